"""What the tensors of a model are called: our canonical names, and each file format's names for them.

Canonical names are the parameter paths of the model with fused parameters taken apart
(`layers.3.attention.query.weight`). Knows strings only.
"""

from collections.abc import Mapping

_HUGGING_FACE: Mapping[str, str] = {
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


def hugging_face_name(tensor: str) -> str:
    """`layers.3.attention.query.weight` -> `model.layers.3.self_attn.q_proj.weight`"""
    return _translate(tensor, _HUGGING_FACE, "model.layers")


def gguf_name(tensor: str) -> str:
    """`layers.3.attention.query.weight` -> `blk.3.attn_q.weight`"""
    return _translate(tensor, _GGUF, "blk")


def _translate(tensor: str, names: Mapping[str, str], layers: str) -> str:
    module, leaf = tensor.rsplit(".", 1)
    if not module.startswith("layers."):
        return f"{names[module]}.{leaf}"
    _, index, part = module.split(".", 2)
    return f"{layers}.{index}.{names[part]}.{leaf}"
