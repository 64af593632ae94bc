"""What serving a model would take and give, before anything is started: memory, KV tokens, predicted times.

Sizes the KV pool by the rules that a start uses. Knows settings, specs and ceilings; needs no weights and no GPU,
and loads neither torch nor Ray.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.config import ClusterConfig
from cluster.driver.resolution import longest_sequence
from cluster.driver.sizing import CPU_LIMIT, RankMemory, pool_size
from cluster.errors import InvalidConfig
from model_shards.plan import ModelPlan, RankPlan, plan_model
from model_shards.roofline import Ceilings, Step, StepCost, step_cost, step_seconds
from model_shards.spec import ModelSpec
from workers.config import ITEM_BYTES, Device, Dtype
from workers.device import default_dtype

GPU_MEMORY = 80 * 2**30  # of each rank, unless the user says otherwise
_NODE = "planned"


@dataclass(frozen=True, slots=True)
class Prediction:
    """One kind of step. `seconds` are by what takes them, and in total."""

    name: str
    step: Step
    cost: StepCost
    seconds: Mapping[str, float]

    @property
    def tokens_per_s(self) -> float:
        return self.step.tokens / self.seconds["total"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingPlan:
    model: str
    device: Device
    dtype: Dtype
    plan: ModelPlan
    block_size: int
    max_model_len: int
    gpu_memory: int | None  # of each rank; None on CPU
    num_blocks: int  # KV blocks that every rank can hold
    ceilings: Ceilings
    predictions: tuple[Prediction, ...]

    @property
    def kv_tokens(self) -> int:
        return self.num_blocks * self.block_size

    def kv_bytes(self, rank: RankPlan) -> int:
        """Of the whole pool, on this rank."""
        return self.kv_tokens * rank.kv_bytes_per_token

    @property
    def does_not_fit(self) -> str | None:
        """Why the model cannot run so; None when it can."""
        for rank in self.plan.ranks:
            needed = rank.weight_bytes + self.kv_bytes(rank)
            if self.gpu_memory is not None and needed > self.gpu_memory:
                return f"rank {rank.rank} needs {needed} bytes and has {self.gpu_memory}"
        return None if self.num_blocks else "no KV block fits beside the weights"


def planned_device(config: ClusterConfig, gpu_memory: int | None) -> Device:
    """A GPU where the user says so or gives it memory. Raises `InvalidConfig` for memory of a GPU on a CPU."""
    if config.device == "cpu" and gpu_memory is not None:
        raise InvalidConfig("--gpu-memory: the device is cpu, which has none; leave away one of the two")
    return "cuda" if config.device == "cuda" or gpu_memory is not None else "cpu"


def plan_serving(
    config: ClusterConfig,
    spec: ModelSpec,
    *,
    device: Device,
    gpu_memory: int | None,
    ceilings: Ceilings,
    prompt_len: int,
    batches: Sequence[int],
) -> ServingPlan:
    """Raises `InvalidConfig` or `PartitionError`."""
    max_model_len = longest_sequence(config, spec)
    dtype = default_dtype(device) if config.dtype == "auto" else config.dtype
    item_bytes = ITEM_BYTES[dtype]
    plan = plan_model(
        spec,
        config.tensor_parallel_size,
        item_bytes=item_bytes,
        packed=device == "cpu" and dtype == "float32",
        shard_weights=config.shard_weights or (),
    )
    memory = (gpu_memory or GPU_MEMORY) if device == "cuda" else None
    return ServingPlan(
        model=config.model_name,
        device=device,
        dtype=dtype,
        plan=plan,
        block_size=config.block_size,
        max_model_len=max_model_len,
        gpu_memory=memory,
        num_blocks=_num_blocks(config, plan, device, memory),
        ceilings=ceilings,
        predictions=_predictions(plan, item_bytes, ceilings, prompt_len, batches),
    )


def _num_blocks(config: ClusterConfig, plan: ModelPlan, device: Device, gpu_memory: int | None) -> int:
    """As at a start, but for the activations of the largest step, which are measured then, on a GPU."""
    ranks = [
        RankMemory(
            _NODE,
            free_bytes=0 if gpu_memory is None else gpu_memory - rank.weight_bytes,
            bytes_per_block=rank.kv_bytes_per_token * config.block_size,
            total_bytes=gpu_memory or 0,
        )
        for rank in plan.ranks
    ]
    budget = config.kv_cache_memory
    if device == "cpu" and budget is None:
        budget = CPU_LIMIT
    return max(
        0,
        pool_size(
            ranks,
            device=device,
            kv_cache_memory=budget,
            gpu_memory_share=config.gpu_memory_share,
            most_useful=sys.maxsize,
        ),
    )


def _predictions(
    plan: ModelPlan, item_bytes: int, ceilings: Ceilings, prompt_len: int, batches: Sequence[int]
) -> tuple[Prediction, ...]:
    steps = {f"prefill of {prompt_len} tokens": Step(1, prompt_len)}
    steps |= {f"decode of {batch} after {prompt_len}": Step(batch, 1, prompt_len) for batch in batches}
    found = []
    for name, step in steps.items():
        cost = step_cost(plan, step, item_bytes)
        found.append(Prediction(name, step, cost, step_seconds(cost, len(plan.ranks), ceilings)))
    return tuple(found)
