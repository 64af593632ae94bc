"""What the tensors of a model are called: our canonical names, and how each file format stores them.

Canonical names are the parameter paths of the model with fused parameters taken apart
(`layers.3.attention.query.weight`), and their shapes [out, in]. Knows strings only.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from model_shards.spec import Architecture

_DECODER: Mapping[str, str] = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_QWEN3_MOE: Mapping[str, str] = {
    **_DECODER,
    "mlp.router": "mlp.gate",
    "mlp.experts.gate": "mlp.experts.{}.gate_proj",
    "mlp.experts.up": "mlp.experts.{}.up_proj",
    "mlp.experts.down": "mlp.experts.{}.down_proj",
}
_MIXTRAL: Mapping[str, str] = {
    **_DECODER,
    "mlp.router": "block_sparse_moe.gate",
    "mlp.experts.gate": "block_sparse_moe.experts.{}.w1",
    "mlp.experts.up": "block_sparse_moe.experts.{}.w3",
    "mlp.experts.down": "block_sparse_moe.experts.{}.w2",
}
_DECODERS: Mapping[Architecture, Mapping[str, str]] = {"qwen3_moe": _QWEN3_MOE, "mixtral": _MIXTRAL}
_GPT2: Mapping[str, str] = {
    "embedding": "transformer.wte",
    "positions": "transformer.wpe",
    "norm": "transformer.ln_f",
    "head": "lm_head",
    "attention_norm": "ln_1",
    "attention.query": "attn.c_attn",
    "attention.key": "attn.c_attn",
    "attention.value": "attn.c_attn",
    "attention.output": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
_GPT2_FUSED = ("attention.query", "attention.key", "attention.value")
_GPT2_TRANSPOSED = (*_GPT2_FUSED, "attention.output", "mlp.up", "mlp.down")
_GGUF: Mapping[str, str] = {
    "embedding": "token_embd",
    "norm": "output_norm",
    "head": "output",
    "attention_norm": "attn_norm",
    "attention.query": "attn_q",
    "attention.key": "attn_k",
    "attention.value": "attn_v",
    "attention.output": "attn_output",
    "attention.query_norm": "attn_q_norm",
    "attention.key_norm": "attn_k_norm",
    "mlp_norm": "ffn_norm",
    "mlp.gate": "ffn_gate",
    "mlp.up": "ffn_up",
    "mlp.down": "ffn_down",
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a file keeps a canonical tensor: a tensor of its own, or one of several equal parts of one."""

    name: str
    transposed: bool = False  # a matrix is stored [in, out]
    part: int = 0  # along the canonical tensor's first axis
    num_parts: int = 1
    interleaved: int = 0  # head size, where the rows of a head lie in pairs of the rotation, 0 where they do not


def hugging_face_tensor(tensor: str, architecture: Architecture) -> StoredTensor:
    """`layers.3.attention.query.weight` -> `model.layers.3.self_attn.q_proj.weight`"""
    if architecture != "gpt2":
        return StoredTensor(_translate(tensor, _DECODERS.get(architecture, _DECODER), "model.layers"))
    name = _translate(tensor, _GPT2, "transformer.h")
    part = _part_of_layer(tensor)
    transposed = part in _GPT2_TRANSPOSED and tensor.endswith(".weight")
    if part in _GPT2_FUSED:
        return StoredTensor(name, transposed, _GPT2_FUSED.index(part), len(_GPT2_FUSED))
    return StoredTensor(name, transposed)


def gguf_name(tensor: str) -> str:
    """`layers.3.attention.query.weight` -> `blk.3.attn_q.weight`"""
    return _translate(tensor, _GGUF, "blk")


def _translate(tensor: str, names: Mapping[str, str], layers: str) -> str:
    module, leaf = tensor.rsplit(".", 1)
    if not module.startswith("layers."):
        return f"{names[module]}.{leaf}"
    _, index, part = module.split(".", 2)
    if part.startswith("mlp.experts."):
        _, _, expert, matrix = part.split(".")
        return f"{layers}.{index}.{names[f'mlp.experts.{matrix}'].format(expert)}.{leaf}"
    return f"{layers}.{index}.{names[part]}.{leaf}"


def _part_of_layer(tensor: str) -> str:
    """`layers.3.attention.query.weight` -> `attention.query`"""
    module = tensor.rsplit(".", 1)[0]
    return module.split(".", 2)[2] if module.startswith("layers.") else module
