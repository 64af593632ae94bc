"""The tiny checkpoints as GGUF files, written with the `gguf` package as llama.cpp's converter writes them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, quants
from torch import Tensor

_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_DETECTED = (GGMLQuantizationType.F32, GGMLQuantizationType.F16)  # from numpy's type, by the writer


def write_gguf(
    path: Path,
    config: Mapping[str, Any],
    weights: Mapping[str, Tensor],  # with Hugging Face's names
    quantisation: GGMLQuantizationType = GGMLQuantizationType.F32,
    *,
    rope_divisors: Tensor | None = None,
) -> dict[str, Tensor]:
    """Write the file, and return the weights as they are in it: quantised and back, in Hugging Face's order."""
    architecture = _ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, architecture)
    _write_metadata(writer, config)
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    stored = {}
    for name, tensor in weights.items():
        # As in llama.cpp: one-dimensional tensors stay float32.
        target = quantisation if tensor.ndim == 2 else GGMLQuantizationType.F32
        data = quants.quantize(tensor.numpy(), target)
        stored[name] = torch.from_numpy(quants.dequantize(data, target).copy())
        if architecture == "llama" and (head_count := _rotated_heads(name, config)):
            data = _interleave(data, head_count)
        stored_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored_name is not None, f"gguf has no name for {name}"
        writer.add_tensor(stored_name, data, raw_dtype=None if target in _DETECTED else target)
    if rope_divisors is not None:
        writer.add_tensor("rope_freqs.weight", rope_divisors.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def _write_metadata(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_token_list([f"token {index}" for index in range(config["vocab_size"])])  # something to skip
    writer.add_eos_token_id(config["eos_token_id"])


def _rotated_heads(name: str, config: Mapping[str, Any]) -> int:
    if ".q_proj." in name:
        return int(config["num_attention_heads"])
    return int(config["num_key_value_heads"]) if ".k_proj." in name else 0


def _interleave(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """The row order of `llama` files: the two halves of each head, one row from each in turn."""
    halves = rows.reshape(num_heads, 2, -1, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)
