"""From a model's own description, `config.json` or a GGUF header, to a `ModelSpec`. Torch-free.

Whatever changes the arithmetic and is not run here is refused by name. Knows the keys of both formats; reads no
weights, only which tensors there are.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model_shards.errors import CheckpointError, UnsupportedModel
from model_shards.rope import DividedFrequencies
from model_shards.spec import ARCHITECTURES, Architecture, ModelSpec
from model_shards.weights.expert_config import DENSE_ONLY_VALUES, MIXTURE_ONLY_VALUES, read_feed_forward
from model_shards.weights.fields import Fields
from model_shards.weights.gguf_header import GgufHeader
from model_shards.weights.gpt2_config import GPT2_ONLY_VALUES, gpt2_spec
from model_shards.weights.rope_config import read_rope_config
from model_shards.weights.safetensors_index import find_tensors, has_weights
from model_shards.weights.window_config import read_windows

_CLASSES: Mapping[str, Architecture] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "MixtralForCausalLM": "mixtral",
    "GPT2LMHeadModel": "gpt2",
}
_DEFAULT_THETA = 10_000.0
_MIXTRAL_THETA = 1_000_000.0
# Settings that change the arithmetic, each with the only values that we run.
_ONLY_VALUES: Mapping[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "partial_rotary_factor": (None, 1, 1.0),
    "quantization_config": (None,),
    "rope_interleaved": (None, False),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
}
_GGUF_ARCHITECTURES: tuple[Architecture, ...] = ("llama", "qwen2", "qwen3")  # Mistral's files say "llama"
_GGUF_ONLY_VALUES: Mapping[str, tuple[object, ...]] = {
    "rope.scaling.type": (None, "none"),
    "rope.scale_linear": (None, 1.0),
    "rope.scaling.factor": (None, 1.0),
    "expert_count": (None, 0),
    "attention.scale": (None,),
    "attention.clamp_kqv": (None,),
    "attention.causal": (None, True),
    "embedding_scale": (None,),
    "residual_scale": (None,),
    "logit_scale": (None,),
}


def read_spec(path: Path) -> ModelSpec:
    """The spec of a Hugging Face folder or of a GGUF file.

    Raises `UnsupportedModel` naming the setting, or `CheckpointError` naming the file and what is wrong in it.
    """
    return folder_spec(path) if path.is_dir() else gguf_spec(GgufHeader(path))


def folder_spec(folder: Path) -> ModelSpec:
    file = folder / "config.json"
    config = Fields(file, _read_json(file))
    architecture = _architecture_of(config)
    tied, eos = _is_tied(folder, config, by_default=architecture == "gpt2"), _eos_token_ids(folder, config)
    if architecture == "gpt2":
        _refuse_others(config, GPT2_ONLY_VALUES)
        return gpt2_spec(config, tied_embeddings=tied, eos_token_ids=eos)
    _refuse_others(config, _ONLY_VALUES)
    has_experts = architecture in ("mixtral", "qwen3_moe")
    _refuse_others(config, MIXTURE_ONLY_VALUES if has_experts else DENSE_ONLY_VALUES)
    feed_forward = read_feed_forward(config, architecture)
    rope = read_rope_config(config, _MIXTRAL_THETA if architecture == "mixtral" else _DEFAULT_THETA)
    query_heads = config.integer("num_attention_heads")
    hidden = config.integer("hidden_size")
    attention_bias = architecture in ("llama", "qwen3", "qwen3_moe") and bool(config.flag("attention_bias"))
    return ModelSpec(
        architecture=architecture,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        num_layers=config.integer("num_hidden_layers"),
        num_query_heads=query_heads,
        num_kv_heads=config.integer("num_key_value_heads", query_heads),
        head_dim=config.integer("head_dim", hidden // max(query_heads, 1)),
        intermediate_size=feed_forward.intermediate_size,
        max_positions=rope.max_positions,
        norm_epsilon=config.number("rms_norm_eps", 1e-5 if architecture == "mixtral" else 1e-6),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        tied_embeddings=tied,
        qkv_bias=architecture == "qwen2" or attention_bias,
        output_bias=attention_bias,
        mlp_bias=architecture == "llama" and bool(config.flag("mlp_bias")),
        query_key_norm=architecture in ("qwen3", "qwen3_moe"),
        num_experts=feed_forward.num_experts,
        experts_per_token=feed_forward.experts_per_token,
        normalised_routing=feed_forward.normalised_routing,
        windows=read_windows(config, architecture, rope.max_positions),
        bos_token_id=config.optional_integer("bos_token_id"),
        eos_token_ids=eos,
    )


def gguf_spec(header: GgufHeader) -> ModelSpec:
    path = header.path
    name = header.fields.get("general.architecture")
    architecture = next((known for known in _GGUF_ARCHITECTURES if known == name), None)
    if architecture is None:
        raise UnsupportedModel(
            f"{path}: general.architecture is {name!r}; from GGUF we run {', '.join(_GGUF_ARCHITECTURES)}"
        )
    prefix = f"{architecture}."
    own = {key.removeprefix(prefix): value for key, value in header.fields.items() if key.startswith(prefix)}
    for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        if header.has_array(prefix + key):
            raise UnsupportedModel(f"{path}: {prefix}{key} differs between layers")
    fields = Fields(path, own)
    _refuse_others(fields, _GGUF_ONLY_VALUES)
    query_heads = fields.integer("attention.head_count")
    hidden = fields.integer("embedding_length")
    head_dim = fields.integer("attention.key_length", hidden // max(query_heads, 1))
    for key in ("rope.dimension_count", "attention.value_length"):
        if fields.integer(key, head_dim) != head_dim:
            raise UnsupportedModel(f"{path}: {prefix}{key} differs from the head size {head_dim}")
    max_positions = fields.integer("context_length")
    if fields.integer("attention.sliding_window", max_positions) < max_positions:
        raise UnsupportedModel(f"{path}: {prefix}attention.sliding_window is not supported")
    return ModelSpec(
        architecture=architecture,
        vocab_size=_gguf_vocabulary(header),
        hidden_size=hidden,
        num_layers=fields.integer("block_count"),
        num_query_heads=query_heads,
        num_kv_heads=fields.integer("attention.head_count_kv", query_heads),
        head_dim=head_dim,
        intermediate_size=fields.integer("feed_forward_length"),
        max_positions=max_positions,
        norm_epsilon=fields.number("attention.layer_norm_rms_epsilon"),
        rope_theta=fields.number("rope.freq_base", _DEFAULT_THETA),
        rope_scaling=_gguf_rope_scaling(header, head_dim),
        tied_embeddings="output.weight" not in header.tensors,
        qkv_bias="blk.0.attn_q.bias" in header.tensors,
        output_bias="blk.0.attn_output.bias" in header.tensors,
        mlp_bias="blk.0.ffn_down.bias" in header.tensors,
        query_key_norm="blk.0.attn_q_norm.weight" in header.tensors,
        bos_token_id=_gguf_token(header, "bos_token_id"),
        eos_token_ids=tuple(
            dict.fromkeys(
                token
                for token in (_gguf_token(header, key) for key in ("eos_token_id", "eot_token_id"))
                if token is not None
            )
        ),
    )


def _architecture_of(config: Fields) -> Architecture:
    names = config.values.get("architectures") or []
    model_type = config.values.get("model_type")
    if names:
        architecture = _CLASSES.get(names[0]) if isinstance(names, list) else None
    else:
        architecture = next((known for known in ARCHITECTURES if known == model_type), None)
    if architecture is None:
        raise UnsupportedModel(
            f"{config.file}: architecture {names[0] if names else model_type!r} is not supported; "
            f"we run {', '.join(_CLASSES)}"
        )
    return architecture


def _refuse_others(fields: Fields, only: Mapping[str, tuple[object, ...]]) -> None:
    for key, values in only.items():
        value = fields.values.get(key, values[0])
        if value not in values:
            raise UnsupportedModel(f"{fields.file}: {key} = {value!r} is not supported")


def _is_tied(folder: Path, config: Fields, *, by_default: bool) -> bool:
    """Whether the head is the embedding. A head in the files is always used: an exporter may have written one
    beside a flag that says otherwise, and if it is a copy the logits are the same."""
    flag = config.flag("tie_word_embeddings")
    if not has_weights(folder):
        return by_default if flag is None else flag
    return flag is not False and "lm_head.weight" not in find_tensors(folder)


def _eos_token_ids(folder: Path, config: Fields) -> tuple[int, ...]:
    """`generation_config.json` speaks for generation and goes first; `config.json` where it is silent."""
    file = folder / "generation_config.json"
    generation = _read_json(file) if file.is_file() else {}
    ids = generation.get("eos_token_id", config.values.get("eos_token_id"))
    if ids is None:
        return ()
    listed = ids if isinstance(ids, list) else [ids]
    if not all(isinstance(token, int) for token in listed):
        raise CheckpointError(f"{folder}: eos_token_id is {ids!r}, not an id or a list of ids")
    return tuple(listed)


def _gguf_vocabulary(header: GgufHeader) -> int:
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{header.path}: has no tensor 'token_embd.weight'")
    return embedding.shape[0]


def _gguf_rope_scaling(header: GgufHeader, head_dim: int) -> DividedFrequencies | None:
    if "rope_freqs.weight" not in header.tensors:
        return None
    divisors = header.numbers("rope_freqs.weight")
    if len(divisors) != head_dim // 2 or min(divisors) <= 0:
        raise CheckpointError(
            f"{header.path}: tensor 'rope_freqs.weight' is not {head_dim // 2} divisors of frequencies"
        )
    return DividedFrequencies(divisors)


def _gguf_token(header: GgufHeader, key: str) -> int | None:
    token = header.fields.get(f"tokenizer.ggml.{key}")
    return token if isinstance(token, int) else None


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: is not a JSON object")
    return content
