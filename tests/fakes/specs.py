"""Specs for tests that need the numbers of a model and no files."""

from typing import Any

from model_shards.spec import ModelSpec

SMOLLM2 = ModelSpec(
    architecture="llama",
    vocab_size=49152,
    hidden_size=576,
    num_layers=30,
    num_query_heads=9,
    num_kv_heads=3,
    head_dim=64,
    intermediate_size=1536,
    max_positions=8192,
    norm_epsilon=1e-5,
    rope_theta=1e5,
    tied_embeddings=True,
)


def tiny_spec(**changes: Any) -> ModelSpec:
    """A Llama with grouped heads, small enough to fill; `changes` are fields of `ModelSpec`."""
    fields: dict[str, Any] = {
        "architecture": "llama",
        "vocab_size": 101,
        "hidden_size": 48,
        "num_layers": 1,
        "num_query_heads": 9,
        "num_kv_heads": 3,
        "head_dim": 4,
        "intermediate_size": 64,
        "max_positions": 64,
        "norm_epsilon": 1e-5,
        "rope_theta": 1e4,
        "tied_embeddings": False,
    }
    return ModelSpec(**fields | changes)
