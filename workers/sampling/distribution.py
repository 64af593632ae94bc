"""One token from one row of logits and one uniform number: temperature, then top-k, then top-p, then min-p.

The order and the meaning are the field's (transformers' `TemperatureLogitsWarper`, `TopKLogitsWarper`,
`TopPLogitsWarper`, `MinPLogitsWarper`), with ties settled: equal logits rank by id, so top_k keeps exactly k. Sums
are in float64. In numpy, whose small steps cost less than torch's.

Knows a row of numbers; knows nothing of ranks, sequences or random generators.
"""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

FloatRow: TypeAlias = npt.NDArray[np.float32]
IdRow: TypeAlias = npt.NDArray[np.int64]

_FIRST_CANDIDATES = 256  # nuclei are small: try the greatest few before sorting a whole vocabulary
_GROWTH = 16
_RUN = 32  # logits of which one stands for all where the greatest are sought
_LEAST_TEMPERATURE = 1e-30  # below it a float32 would become 0


def draw(
    logits: FloatRow,  # [vocabulary]
    u: float,
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float = 0.0,
) -> int:
    """The id whose part of the cumulative distribution, in the order of ids, holds `u` of [0, 1)."""
    ids = allowed_ids(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    weights = _weights(logits if ids is None else logits[ids], temperature)
    cumulative = (
        torch.from_numpy(weights).cumsum(0, dtype=torch.float64).numpy()
    )  # numpy's takes three times as long
    last = int(cumulative.searchsorted(cumulative[-1]))  # rounding must not lead past the last with any weight
    place = min(int(cumulative.searchsorted(cumulative[-1] * u, side="right")), last)
    return place if ids is None else int(ids[place])


def allowed_ids(
    logits: FloatRow,  # [vocabulary]
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float = 0.0,
) -> IdRow | None:  # [allowed], ascending
    """The ids that top_k, top_p and min_p leave; None means all of them."""
    limit = top_k if 0 < top_k < len(logits) else len(logits)
    if top_p < 1:
        ids = np.sort(_nucleus(logits, temperature, limit, top_p))
    elif limit < len(logits):
        ids = np.sort(greatest(logits, limit))
    elif min_p > 0:
        ids = np.arange(len(logits))
    else:
        return None
    # The greatest logit is always among `ids` and weighs 1, so a weight is a share of the greatest probability.
    return ids[_weights(logits[ids], temperature) >= min_p] if min_p > 0 else ids


def _nucleus(logits: FloatRow, temperature: float, limit: int, top_p: float) -> IdRow:
    """The fewest of the `limit` greatest ids that hold `top_p` of what these hold together."""
    if limit < len(logits):
        ids = greatest(logits, limit)
        found = _weights(logits[ids], temperature)
        return ids[: _reach(found, top_p * float(found.sum(dtype=np.float64)))]
    weights = _weights(logits, temperature)
    mass = top_p * float(weights.sum(dtype=np.float64))
    count = min(_FIRST_CANDIDATES, limit)
    while True:
        ids = greatest(logits, count)
        found = weights[ids]
        if count == limit or found.sum(dtype=np.float64) >= mass:
            return ids[: _reach(found, mass)]
        count = min(count * _GROWTH, limit)


def _reach(weights: FloatRow, mass: float) -> int:
    """How many of the falling `weights` stay: the first, and each while those before hold less than `mass`."""
    return 1 + int(weights[:-1].cumsum(dtype=np.float64).searchsorted(mass))


def _weights(logits: FloatRow, temperature: float) -> FloatRow:
    """Unnormalised probabilities, at most 1. The greatest is subtracted first: no temperature overflows."""
    scaled: FloatRow = logits - logits.max()
    with np.errstate(over="ignore"):  # to minus infinity, which weighs nothing
        scaled /= np.float32(max(temperature, _LEAST_TEMPERATURE))
    np.exp(scaled, out=scaled)
    return scaled


def greatest(logits: FloatRow, count: int) -> IdRow:
    """The ids of the `count` greatest logits (at least one), greatest first, equal ones by id."""
    ids = np.flatnonzero(logits >= _floor(logits, count))  # in the order of ids: `count` of them or some more
    return ids[np.argsort(-logits[ids], kind="stable")[:count]]


def _floor(logits: FloatRow, count: int) -> np.float32:
    """A value that at least `count` logits reach, and few more.

    As many short runs of logits have a greatest one that reaches it, and to find these costs a fraction of what it
    costs to partition a vocabulary.
    """
    num_runs = len(logits) // _RUN
    if num_runs >= count:
        logits = logits[: num_runs * _RUN].reshape(_RUN, num_runs).max(axis=0)
    floor: np.float32 = np.partition(logits, -count)[-count]
    return floor
