"""Plans of serving: sized by the rules of a start, and honest about what does not fit."""

import pytest

from cluster.config import ClusterConfig
from cluster.driver.sizing import CPU_LIMIT
from cluster.errors import InvalidConfig
from cluster.planning import GPU_MEMORY, ServingPlan, plan_serving, planned_device
from model_shards.roofline import CPU
from tests.fakes.specs import SMOLLM2

GIB = 2**30


def planned(gpu_memory: int | None = None, **settings: object) -> ServingPlan:
    config = ClusterConfig.parse({"model": "smollm2", "tensor_parallel_size": 2, **settings})
    device = planned_device(config, gpu_memory)
    return plan_serving(
        config, SMOLLM2, device=device, gpu_memory=gpu_memory, ceilings=CPU, prompt_len=128, batches=(1, 8)
    )


def test_gpus_give_their_share_of_what_the_weights_leave() -> None:
    plan = planned(GIB, gpu_memory_share=0.5)
    assert (plan.device, plan.dtype, plan.gpu_memory) == ("cuda", "bfloat16", GIB)
    heavy, light = plan.plan.ranks
    assert heavy.tied_copy_bytes == light.tied_copy_bytes == 0
    block = heavy.kv_bytes_per_token * 16
    assert plan.num_blocks == (int(GIB * 0.5) - heavy.weight_bytes) // block
    assert plan.kv_tokens == 16 * plan.num_blocks
    assert plan.kv_bytes(heavy) == 2 * plan.kv_bytes(light)
    assert plan.does_not_fit is None
    assert planned(device="cuda").gpu_memory == GPU_MEMORY


def test_cpu_ranks_share_the_default_budget() -> None:
    plan = planned(dtype="float32")
    assert (plan.device, plan.gpu_memory) == ("cpu", None)
    assert all(rank.tied_copy_bytes for rank in plan.plan.ranks)
    taken = sum(plan.kv_bytes(rank) for rank in plan.plan.ranks)
    assert CPU_LIMIT - sum(rank.kv_bytes_per_token * 16 for rank in plan.plan.ranks) < taken <= CPU_LIMIT


def test_a_set_budget_is_taken() -> None:
    plan = planned(kv_cache_memory="64MiB", dtype="bfloat16")
    assert plan.num_blocks == 64 * 2**20 // sum(rank.kv_bytes_per_token * 16 for rank in plan.plan.ranks)


@pytest.mark.parametrize(
    ("gpu_memory", "settings", "why"),
    [
        (64 * 2**20, {}, "rank 0 needs"),
        (GIB, {"kv_cache_memory": "8GiB"}, "rank 0 needs"),
        (150 * 2**20, {"block_size": 1024}, "no KV block fits beside the weights"),
    ],
)
def test_what_does_not_fit_is_said(gpu_memory: int, settings: dict[str, object], why: str) -> None:
    assert str(planned(gpu_memory, **settings).does_not_fit).startswith(why)


def test_predictions_are_of_a_prefill_and_of_each_batch() -> None:
    plan = planned(GIB)
    assert [prediction.step.tokens for prediction in plan.predictions] == [128, 1, 8]
    assert all(prediction.seconds["total"] > 0 for prediction in plan.predictions)
    prefill = plan.predictions[0]
    assert prefill.tokens_per_s == 128 / prefill.seconds["total"]


def test_mistakes() -> None:
    with pytest.raises(InvalidConfig, match="--gpu-memory: the device is cpu"):
        planned(GIB, device="cpu")
    with pytest.raises(InvalidConfig, match="max_model_len is 9000, but the model has 8192 positions"):
        planned(max_model_len=9000)
