"""`transformers` as the judge: its models of our checkpoints, float32, read without any of our own code.

GGUF files are read with the `gguf` package (transformers' own GGUF path takes minutes for SmolLM2).
"""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import quants


def reference_model(path: Path) -> Any:
    """The `transformers` model of a Hugging Face folder or of a `llama` GGUF file."""
    from transformers import AutoModelForCausalLM

    if path.is_dir():
        return AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        )
    return _model_of_gguf(path)


def _model_of_gguf(path: Path) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    reader = gguf.GGUFReader(path)

    def field(key: str) -> Any:
        return reader.fields[f"llama.{key}"].contents()

    heads = {"attn_q": field("attention.head_count"), "attn_k": field("attention.head_count_kv")}
    names = _hugging_face_names(field("block_count"))
    weights = {}
    for tensor in reader.tensors:
        data = quants.dequantize(tensor.data, tensor.tensor_type)
        if num_heads := heads.get(tensor.name.split(".")[-2]):
            data = data.reshape(num_heads, -1, 2, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)
        weights[names[tensor.name]] = torch.from_numpy(np.array(data))
    config = LlamaConfig(
        vocab_size=field("vocab_size"),
        hidden_size=field("embedding_length"),
        num_hidden_layers=field("block_count"),
        num_attention_heads=heads["attn_q"],
        num_key_value_heads=heads["attn_k"],
        intermediate_size=field("feed_forward_length"),
        max_position_embeddings=field("context_length"),
        rms_norm_eps=field("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field("rope.freq_base")},
        tie_word_embeddings="lm_head.weight" not in weights,
    )
    config._attn_implementation = "eager"
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to_empty(device="cpu")
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config)  # its frequencies are in no file
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"}, missing
    model.tie_weights()
    model.train(False)
    return model


def _hugging_face_names(num_layers: int) -> dict[str, str]:
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, num_layers)
    modules = ["model.embed_tokens", "model.norm", "lm_head"]
    for layer in range(num_layers):
        parts = ["input_layernorm", "post_attention_layernorm"]
        parts += [f"self_attn.{name}_proj" for name in "qkvo"]
        parts += [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
        modules += [f"model.layers.{layer}.{part}" for part in parts]
    return {f"{table.get_name(module)}.weight": f"{module}.weight" for module in modules}
