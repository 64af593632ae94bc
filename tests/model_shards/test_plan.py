"""Plans: their bytes are those that a model and its KV cache really take, for every family and cut."""

from pathlib import Path
from typing import Any

import pytest
import torch

from model_shards.errors import PartitionError
from model_shards.families.decoder import Decoder
from model_shards.layers.linear import Linear, packing_works
from model_shards.plan import ModelPlan, plan_model
from model_shards.registry import Model
from model_shards.weights.loader import load_model
from model_shards.weights.metadata import read_spec
from tests.fakes.checkpoints import write_tiny_model
from tests.fakes.specs import SMOLLM2
from tests.fakes.thread_group import run_ranks
from workers.kv_cache import KvCache

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied, biases, odd FFN": (
        "llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "intermediate_size": 67},
    ),
    "llama, one KV head": ("llama", {"num_key_value_heads": 1}),
    "mistral": ("mistral", {"sliding_window": 5}),
    "qwen2": ("qwen2", {"head_dim": ..., "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3_moe": ("qwen3_moe", {}),
    "mixtral": ("mixtral", {"tie_word_embeddings": True}),
    "gpt2": ("gpt2", {}),
    "gpt2, 5 heads, untied": ("gpt2", {"n_head": 5, "n_embd": 80, "tie_word_embeddings": False}),
}


def allocated_bytes(model: Model) -> int:
    """Of parameters, each memory once, of packed weights, and of the rotary table."""
    memories = {parameter.data_ptr(): parameter.nbytes for parameter in model.parameters()}
    packed = sum(
        module.dense_weight().nbytes
        for module in model.modules()
        if isinstance(module, Linear) and module.weight is None
    )
    tables = [model._rotary._cosine, model._rotary._sine] if isinstance(model, Decoder) else []
    return sum(memories.values()) + packed + sum(table.nbytes for table in tables)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_bytes_are_those_really_allocated(tmp_path: Path, name: str, ranks: int, dtype: torch.dtype) -> None:
    family, overrides = FAMILIES[name]
    folder = write_tiny_model(tmp_path, family, **overrides)
    models = run_ranks(ranks, lambda group: load_model(folder, group, device=torch.device("cpu"), dtype=dtype))
    packed = dtype == torch.float32 and packing_works(96, 96)
    plan = plan_model(read_spec(folder), ranks, item_bytes=dtype.itemsize, packed=packed)
    assert [rank.weight_bytes for rank in plan.ranks] == [allocated_bytes(model) for model in models]

    name_of = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
    for rank, model in zip(plan.ranks, models, strict=True):
        cache = KvCache(model, num_blocks=3, block_size=4, dtype=name_of[dtype], device="cpu")  # type: ignore[arg-type]
        assert sum(layer.nbytes for layer in cache.layers) == 12 * rank.kv_bytes_per_token


def smollm2_plan(ranks: int, shard_weights: tuple[int, ...] = ()) -> ModelPlan:
    return plan_model(SMOLLM2, ranks, item_bytes=2, packed=False, shard_weights=shard_weights)


def test_smollm2_on_two_ranks() -> None:
    plan = smollm2_plan(2)
    assert [(rank.query_heads, rank.kv_heads) for rank in plan.ranks] == [(6, 2), (3, 1)]
    heavy, light = sorted(rank.weight_bytes for rank in plan.ranks)
    assert light < 1.05 * heavy
    assert [rank.kv_bytes_per_token for rank in plan.ranks] == [2 * 30 * 2 * 64 * 2, 2 * 30 * 64 * 2]
    whole = smollm2_plan(1).ranks[0]
    assert whole.shard_bytes == 134_515_008 * 2
    assert whole.table_bytes == 2 * 8192 * 64 * 2


def test_cuts_name_the_rule_of_every_tensor() -> None:
    cuts = {cut.tensor: cut for cut in smollm2_plan(4).cuts}
    query, key = cuts["layers.*.attention.query.weight"], cuts["layers.*.attention.key.weight"]
    assert (query.count, query.shape, query.rule, query.sizes) == (30, (576, 576), "rows", (128, 64, 192, 192))
    assert (key.sizes, key.replicated, query.replicated) == ((64, 64, 64, 64), True, False)
    assert cuts["layers.*.attention.output.weight"].rule == "columns"
    assert cuts["layers.*.mlp.down.weight"].rule == "columns"
    assert cuts["embedding.weight"].rule == "rows"
    assert (cuts["norm.weight"].rule, cuts["norm.weight"].sizes) == ("whole", ())


def test_experts_are_counted_together(tmp_path: Path) -> None:
    spec = read_spec(write_tiny_model(tmp_path, "mixtral"))
    cuts = {cut.tensor: cut for cut in plan_model(spec, 2, item_bytes=2, packed=False).cuts}
    assert cuts["layers.*.mlp.experts.*.gate.weight"].count == 10
    assert cuts["layers.*.mlp.router.weight"].rule == "whole"


def test_a_cut_that_cannot_be_made_is_refused() -> None:
    with pytest.raises(PartitionError, match="9 query heads cannot be split over 10 ranks"):
        smollm2_plan(10)
    with pytest.raises(PartitionError, match=r"shard weights \[2, 1\] are not 3 positive numbers"):
        smollm2_plan(3, (2, 1))
