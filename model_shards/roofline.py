"""How long a step takes at least, by the roofline: arithmetic, memory traffic and all-reduces against ceilings.

Counts what cannot be avoided: each weight read once a step, keys and values once for each sequence, two operations
for each weight and token. Activations, kernel starts and the host are left out, so measured times are longer.
Source: Williams, Waterman, Patterson, "Roofline" (2009). Torch-free; knows plans and ceilings, no devices.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from model_shards.plan import ModelPlan
from model_shards.spec import ModelSpec

_NOT_MULTIPLIED = ("embedding.weight", "positions.weight")  # looked up, a row a token


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What one rank's device can do at best, and what connects the ranks."""

    flops: float  # floating-point operations a second, in the dtype that is computed in
    memory_bandwidth: float  # bytes a second
    link_bandwidth: float  # bytes a second between ranks, in one direction
    link_latency_s: float  # of one all-reduce, however small


# An H100 SXM: dense bfloat16, HBM3, NVLink 4.
GPU = Ceilings(flops=989e12, memory_bandwidth=3.35e12, link_bandwidth=450e9, link_latency_s=10e-6)
# A core of a server CPU with AVX2, float32; ranks that meet in shared memory.
CPU = Ceilings(flops=80e9, memory_bandwidth=15e9, link_bandwidth=5e9, link_latency_s=12e-6)


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass: `sequences` of equal length, each with `new_tokens` after `cached_tokens`."""

    sequences: int
    new_tokens: int
    cached_tokens: int = 0

    @property
    def tokens(self) -> int:
        return self.sequences * self.new_tokens


@dataclass(frozen=True, slots=True)
class StepCost:
    """Of the rank that has most to do in each respect."""

    flops: float
    memory_bytes: float
    all_reduces: int
    all_reduce_bytes: float  # of all of them, as one rank's tensors


def step_cost(plan: ModelPlan, step: Step, item_bytes: int) -> StepCost:
    spec, ranks = plan.spec, range(len(plan.ranks))
    # After attention and after the feed-forward layer, and once for the embedding.
    all_reduces = 2 * spec.num_layers + 1 if len(ranks) > 1 else 0
    return StepCost(
        flops=max(_flops(plan, rank, step) for rank in ranks),
        memory_bytes=max(_memory_bytes(plan, rank, step, item_bytes) for rank in ranks),
        all_reduces=all_reduces,
        all_reduce_bytes=all_reduces * step.tokens * spec.hidden_size * item_bytes,
    )


def step_seconds(cost: StepCost, num_ranks: int, ceilings: Ceilings) -> Mapping[str, float]:
    """Seconds by what takes them. Arithmetic and memory traffic overlap, all-reduces (as rings) do not."""
    compute = cost.flops / ceilings.flops
    memory = cost.memory_bytes / ceilings.memory_bandwidth
    moved = 2 * (num_ranks - 1) / num_ranks * cost.all_reduce_bytes
    all_reduce = moved / ceilings.link_bandwidth + cost.all_reduces * ceilings.link_latency_s
    return {
        "compute": compute,
        "memory": memory,
        "all_reduce": all_reduce,
        "total": max(compute, memory) + all_reduce,
    }


def _flops(plan: ModelPlan, rank: int, step: Step) -> float:
    spec = plan.spec
    used = spec.experts_per_token / spec.num_experts if spec.num_experts else 1.0
    dense, experts = _multiplied(plan, rank)
    matrices = 2 * step.tokens * (dense + used * experts)
    head = 2 * step.sequences * _head_size(plan, rank)
    scores_and_values = 4 * spec.head_dim * plan.ranks[rank].query_heads
    return matrices + head + scores_and_values * step.sequences * _keys_seen(spec, step)


def _memory_bytes(plan: ModelPlan, rank: int, step: Step, item_bytes: int) -> float:
    spec = plan.spec
    dense, experts = _multiplied(plan, rank)
    looked_up = step.tokens * spec.hidden_size
    weights = dense + experts * _share_of_experts(spec, step.tokens) + _head_size(plan, rank) + looked_up
    kv_bytes = plan.ranks[rank].kv_bytes_per_token // spec.num_layers
    kept = sum(min(step.cached_tokens, window or step.cached_tokens) for window in _windows(spec))
    kv_tokens = step.sequences * (kept + spec.num_layers * step.new_tokens)
    return weights * item_bytes + kv_tokens * kv_bytes


def _multiplied(plan: ModelPlan, rank: int) -> tuple[int, int]:
    """Weights of all layers on this rank that take part in products: outside of experts, and in experts."""
    dense = experts = 0
    for name, parameter in plan.layout.items():
        if name in _NOT_MULTIPLIED or name == "head.weight":
            continue
        if ".experts." in name:
            experts += parameter.local_size(rank)
        else:
            dense += parameter.local_size(rank)
    return dense, experts


def _head_size(plan: ModelPlan, rank: int) -> int:
    return plan.layout["embedding.weight"].local_size(rank)  # tied or not, the head is as large


def _share_of_experts(spec: ModelSpec, tokens: int) -> float:
    """Of all experts, how many some token of a step is expected to need, when they are chosen evenly."""
    if not spec.num_experts:
        return 1.0
    return 1.0 - (1.0 - spec.experts_per_token / spec.num_experts) ** tokens


def _keys_seen(spec: ModelSpec, step: Step) -> int:
    """By all new tokens of a sequence, in all layers together."""
    first, last = step.cached_tokens + 1, step.cached_tokens + step.new_tokens
    total = 0
    for window in _windows(spec):
        growing = (
            last if window is None else min(last, max(window, first - 1))
        )  # up to here a token sees all before
        total += (first + growing) * (growing - first + 1) // 2 + (last - growing) * (window or 0)
    return total


def _windows(spec: ModelSpec) -> tuple[int | None, ...]:
    return spec.windows or (None,) * spec.num_layers
