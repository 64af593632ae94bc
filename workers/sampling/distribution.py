"""One token from one row of logits and one uniform number: temperature, then top-k, then top-p.

The order and the meaning are the field's (transformers' `TemperatureLogitsWarper`, `TopKLogitsWarper`,
`TopPLogitsWarper`), with ties settled: equal logits rank by id, so top_k keeps exactly k. Sums are in float64.

Knows a row of numbers; knows nothing of ranks, sequences or random generators.
"""

import torch
from torch import Tensor

_FIRST_CANDIDATES = 256  # nuclei are small: try the greatest few before sorting a whole vocabulary
_GROWTH = 16


def draw(
    logits: Tensor,  # [vocabulary] float32
    u: float,
    *,
    temperature: float,
    top_k: int,
    top_p: float,
) -> int:
    """The id whose part of the cumulative distribution, in the order of ids, holds `u` of [0, 1)."""
    ids = allowed_ids(logits, temperature=temperature, top_k=top_k, top_p=top_p)
    kept = logits if ids is None else logits[ids]
    cumulative = _weights(kept, temperature).cumsum(0, dtype=torch.float64)
    place = int(torch.searchsorted(cumulative, cumulative[-1] * u, right=True))
    place = min(place, int(torch.searchsorted(cumulative, cumulative[-1])))  # never past the last with any weight
    return place if ids is None else int(ids[place])


def allowed_ids(
    logits: Tensor,  # [vocabulary] float32
    *,
    temperature: float,
    top_k: int,
    top_p: float,
) -> Tensor | None:  # [allowed] int64, ascending
    """The ids that top_k and top_p leave; None means all of them."""
    vocab_size = len(logits)
    limit = top_k if 0 < top_k < vocab_size else vocab_size
    if top_p >= 1:
        return None if limit == vocab_size else _greatest(logits, limit).sort().values
    weights = _weights(logits, temperature)
    total = weights.sum(dtype=torch.float64)
    count = min(_FIRST_CANDIDATES, limit)
    while True:
        ids = _greatest(logits, count)
        cumulative = weights[ids].cumsum(0, dtype=torch.float64)
        mass = top_p * (cumulative[-1] if count == limit < vocab_size else total)
        if count == limit or cumulative[-1] >= mass:
            if limit < vocab_size and count < limit:
                count = limit
                continue
            # A token stays while those before it have not reached top_p together: so the first always does.
            before = cumulative - weights[ids]
            return ids[: max(1, int(torch.searchsorted(before, mass)))].sort().values
        count = min(count * _GROWTH, limit)


def _weights(logits: Tensor, temperature: float) -> Tensor:
    """Unnormalised probabilities, at most 1. The greatest is subtracted first: no temperature overflows."""
    return ((logits - logits.max()) / temperature).exp()


def _greatest(logits: Tensor, count: int) -> Tensor:
    """The ids of the `count` greatest logits, greatest first, equal ones by id."""
    threshold = logits.topk(count).values[-1]
    ids = (logits >= threshold).nonzero().squeeze(1)  # in the order of ids, with all that tie at the end
    order = logits[ids].sort(descending=True, stable=True).indices
    return ids[order[:count]]
