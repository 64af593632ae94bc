"""The roofline: counts that can be checked by hand, and how they turn into seconds."""

from dataclasses import replace

import pytest

from model_shards.plan import plan_model
from model_shards.roofline import Ceilings, Step, StepCost, step_cost, step_seconds
from model_shards.spec import ModelSpec
from tests.fakes.specs import tiny_spec

SPEC = tiny_spec(
    vocab_size=100,
    hidden_size=8,
    num_layers=2,
    num_query_heads=4,
    num_kv_heads=2,
    head_dim=2,
    intermediate_size=10,
    tied_embeddings=True,
)
# A layer: query and output 8 x 8, key and value 4 x 8, three FFN matrices 10 x 8, two norms of 8.
LAYER = 2 * 64 + 2 * 32 + 3 * 80 + 2 * 8
HEAD = 100 * 8


def cost(spec: ModelSpec, step: Step, ranks: int = 1) -> StepCost:
    return step_cost(plan_model(spec, ranks, item_bytes=2, packed=False), step, 2)


def test_a_decode_reads_every_weight_once_and_the_keys_and_values_of_each_sequence() -> None:
    found = cost(SPEC, Step(sequences=3, new_tokens=1, cached_tokens=9))
    weights = 2 * LAYER + 8 + HEAD
    kv_token = 2 * 2 * 2 * 2 * 2  # keys and values, layers, heads, head_dim, bytes
    assert found.memory_bytes == 2 * (weights + 3 * 8) + 3 * 10 * kv_token
    assert found.flops == 2 * 3 * weights + 4 * 2 * 4 * 3 * 2 * 10
    assert (found.all_reduces, found.all_reduce_bytes) == (0, 0)


def test_a_prefill_attends_to_what_is_before_each_token_and_makes_one_row_of_logits() -> None:
    found = cost(SPEC, Step(sequences=1, new_tokens=5))
    assert found.flops == 2 * 5 * (2 * LAYER + 8) + 2 * HEAD + 4 * 2 * 4 * 2 * (1 + 2 + 3 + 4 + 5)


@pytest.mark.parametrize(
    ("step", "keys"),
    [
        (Step(1, 5), (1 + 2 + 3 + 3 + 3) + 15),
        (Step(1, 1, 9), 3 + 10),
        (Step(1, 2, 1), (2 + 3) + 5),
        (Step(1, 4, 3), 4 * 3 + 4 + 5 + 6 + 7),
    ],
)
def test_a_window_bounds_what_a_token_sees(step: Step, keys: int) -> None:
    windowed = replace(SPEC, windows=(3, None))
    matrices = 2 * step.tokens * (2 * LAYER + 8) + 2 * HEAD
    assert cost(windowed, step).flops == matrices + 4 * 2 * 4 * keys


def test_a_window_bounds_what_is_read() -> None:
    windowed = replace(SPEC, windows=(3, None))
    step = Step(sequences=2, new_tokens=1, cached_tokens=9)
    kv_layer = 2 * 2 * 2 * 2
    assert cost(SPEC, step).memory_bytes - cost(windowed, step).memory_bytes == 2 * 6 * kv_layer


def test_few_tokens_need_few_experts() -> None:
    sparse = replace(SPEC, architecture="mixtral", num_experts=8, experts_per_token=2)
    one, many = (cost(sparse, Step(batch, 1)) for batch in (1, 1000))
    expert = 3 * 80
    router = 8 * 8
    dense = 2 * (LAYER - expert + router) + 8 + HEAD
    assert one.memory_bytes == pytest.approx(2 * (dense + 2 * 2 * expert + 8) + 32)
    assert many.memory_bytes == pytest.approx(2 * (dense + 2 * 8 * expert + 8000) + 32_000)
    assert one.flops == 2 * (dense + 2 * 2 * expert) + 4 * 2 * 4 * 2


def test_ranks_all_reduce_twice_a_layer_and_once_for_the_embedding() -> None:
    found = cost(SPEC, Step(3, 1, 9), ranks=2)
    assert (found.all_reduces, found.all_reduce_bytes) == (5, 5 * 3 * 8 * 2)
    assert cost(SPEC, Step(3, 1, 9)).memory_bytes / 2 < found.memory_bytes < cost(SPEC, Step(3, 1, 9)).memory_bytes


def test_compute_and_memory_overlap_and_all_reduces_do_not() -> None:
    ceilings = Ceilings(flops=100.0, memory_bandwidth=10.0, link_bandwidth=5.0, link_latency_s=0.5)
    seconds = step_seconds(StepCost(200.0, 50.0, 3, 20.0), 4, ceilings)
    assert seconds == {
        "compute": 2.0,
        "memory": 5.0,
        "all_reduce": pytest.approx(1.5 * 20 / 5 + 1.5),
        "total": pytest.approx(5.0 + 7.5),
    }
    assert step_seconds(StepCost(200.0, 5.0, 0, 0.0), 1, ceilings)["total"] == 2.0
