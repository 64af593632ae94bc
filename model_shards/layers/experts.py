"""A mixture of experts over this rank's columns of every expert: router, choice, and the chosen products.

The router is whole on every rank, so all ranks choose alike and sum as for one feed-forward layer. Invariant: a
token's result has the same bits whatever other tokens went to the same expert. It rests on `Linear`'s rule for
rows and on an order of summation that depends on the token alone: by expert. Knows nothing of tokens'
places or of attention.
"""

import torch
from torch import Tensor, nn

from model_shards.layers import ops
from model_shards.layers.linear import Linear
from model_shards.layers.placement import Placement
from model_shards.spec import ModelSpec


class MixtureOfExperts(nn.Module):
    """Sums `expert(x)` over the experts that the router gives a token, times their weights."""

    def __init__(self, spec: ModelSpec, num_columns: int, placement: Placement) -> None:
        super().__init__()
        self.router = Linear(spec.num_experts, spec.hidden_size, placement)
        self.experts = nn.ModuleList(Expert(spec, num_columns, placement) for _ in range(spec.num_experts))
        self._experts_per_token = spec.experts_per_token
        self._normalise = spec.normalised_routing
        self._group = placement.group

    def forward(
        self,
        hidden: Tensor,  # [tokens, hidden]
    ) -> Tensor:  # [tokens, hidden], equal on every rank
        weights, chosen = route(self.router(hidden), self._experts_per_token, normalise=self._normalise)
        by_expert = chosen.flatten().argsort(stable=True)
        tokens = by_expert // self._experts_per_token
        scales = weights.flatten()[by_expert].to(hidden.dtype).unsqueeze(1)
        counts = torch.bincount(chosen.flatten(), minlength=len(self.experts)).tolist()
        total = torch.zeros_like(hidden)
        start = 0
        for expert, count in zip(self.experts, counts, strict=True):
            if count:
                here = slice(start, start + count)
                total.index_add_(0, tokens[here], expert(hidden[tokens[here]]) * scales[here])
                start += count
        return self._group.all_reduce(total)


class Expert(nn.Module):
    """`down(silu(gate(x)) * up(x))` over local columns: a partial sum, which the mixture sums over the ranks."""

    def __init__(self, spec: ModelSpec, num_columns: int, placement: Placement) -> None:
        super().__init__()
        self.gate_up = Linear(2 * num_columns, spec.hidden_size, placement)
        self.down = Linear(spec.hidden_size, num_columns, placement)

    def forward(
        self,
        rows: Tensor,  # [rows, hidden]
    ) -> Tensor:  # [rows, hidden]
        partial: Tensor = self.down(ops.silu_and_multiply(self.gate_up(rows)))
        return partial


def route(
    logits: Tensor,  # [tokens, experts]
    experts_per_token: int,
    *,
    normalise: bool,
) -> tuple[Tensor, Tensor]:  # both [tokens, experts_per_token]: weights in float32, and experts
    """The most probable experts of each token, most probable first, the lower id first among equals."""
    ordered, experts = logits.float().softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    weights = ordered[:, :experts_per_token]
    if normalise:
        # One addition after another: a reduction may choose its order by the shape.
        weights = weights / sum(weights.unbind(1)).unsqueeze(1)  # type: ignore[union-attr]  # never an int
    return weights, experts[:, :experts_per_token]
