"""Samples to figures: TTFT, ITL, TPOT, throughput. Knows numbers; knows nothing of HTTP or display.

TTFT: from the start of a request to its first text. ITL: the gap between two chunks of text, over all requests.
TPOT: a request's time after its first text, divided by its tokens after the first. Times are in milliseconds.
"""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cluster.bench.streaming import Sample


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and 99th percentile of a measurement; None when nothing was measured."""

    median: float | None
    p99: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        ordered = sorted(values)
        return cls(percentile(ordered, 50), percentile(ordered, 99))


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelSummary:
    """One level of load. `load` says how it was made: `8 at once` or `4.0 requests/s`."""

    load: str
    duration_s: float
    completed: int
    failed: int
    unfinished: int  # cut off by the time limit; part of no figure below
    failures: dict[str, int]  # reason -> how often
    prompt_tokens_mean: float | None
    output_tokens: int
    output_tokens_per_s: float
    requests_per_s: float
    tokens_from_usage: bool  # False: one chunk counts as one token
    ttft_ms: Spread
    itl_ms: Spread
    tpot_ms: Spread
    worker_wait_share: float | None  # of their time, for the driver; None: the server does not tell

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def percentile(ordered: Sequence[float], percent: float) -> float | None:
    """By linear interpolation between the two nearest of the `ordered` values."""
    if not ordered:
        return None
    position = (len(ordered) - 1) * percent / 100
    low = math.floor(position)
    high = math.ceil(position)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def summarize(
    load: str,
    samples: Sequence[Sample],
    *,
    duration_s: float,
    unfinished: int,
    worker_wait_share: float | None = None,
) -> LevelSummary:
    """The figures of one level, over the requests that completed."""
    good = [sample for sample in samples if sample.failure is None]
    failures = Counter(sample.failure for sample in samples if sample.failure is not None)
    prompt_tokens = [sample.prompt_tokens for sample in good if sample.prompt_tokens is not None]
    output_tokens = sum(sample.output_tokens for sample in good)
    return LevelSummary(
        load=load,
        duration_s=duration_s,
        completed=len(good),
        failed=len(samples) - len(good),
        unfinished=unfinished,
        failures=dict(failures.most_common()),
        prompt_tokens_mean=sum(prompt_tokens) / len(prompt_tokens) if prompt_tokens else None,
        output_tokens=output_tokens,
        output_tokens_per_s=output_tokens / duration_s if duration_s > 0 else 0.0,
        requests_per_s=len(good) / duration_s if duration_s > 0 else 0.0,
        tokens_from_usage=bool(prompt_tokens),
        ttft_ms=Spread.of([1e3 * (s.chunk_times[0] - s.started) for s in good if s.chunk_times]),
        itl_ms=Spread.of([1e3 * gap for s in good for gap in _gaps(s.chunk_times)]),
        tpot_ms=Spread.of([1e3 * tpot for s in good if (tpot := _tpot(s)) is not None]),
        worker_wait_share=worker_wait_share,
    )


def _gaps(times: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def _tpot(sample: Sample) -> float | None:
    if sample.output_tokens < 2 or len(sample.chunk_times) < 2:
        return None
    return (sample.chunk_times[-1] - sample.chunk_times[0]) / (sample.output_tokens - 1)
