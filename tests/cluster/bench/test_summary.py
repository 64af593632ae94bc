"""Figures from samples whose times are known."""

import pytest

from cluster.bench.streaming import Sample
from cluster.bench.summary import percentile, summarize


def _sample(started: float, times: list[float], tokens: int, **changes: object) -> Sample:
    sample = Sample(started=started, chunk_times=times, ended=times[-1] if times else started)
    sample.output_tokens = tokens
    sample.prompt_tokens = 10
    for name, value in changes.items():
        setattr(sample, name, value)
    return sample


def test_percentile_interpolates() -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], 50) == 2.5
    assert percentile([1.0, 2.0, 3.0, 4.0], 99) == pytest.approx(3.97)
    assert percentile([5.0], 99) == 5.0
    assert percentile([], 50) is None


def test_figures_of_completed_requests() -> None:
    samples = [_sample(0.0, [0.1, 0.2, 0.3], 3), _sample(0.0, [0.3, 0.5], 5)]
    level = summarize("2 at once", samples, duration_s=2.0, unfinished=0)
    assert (level.completed, level.failed, level.output_tokens) == (2, 0, 8)
    assert level.output_tokens_per_s == 4.0
    assert level.requests_per_s == 1.0
    assert level.ttft_ms.median == pytest.approx(200)
    assert level.itl_ms.median == pytest.approx(100)
    assert level.tpot_ms.median == pytest.approx((100 + 50) / 2)
    assert level.prompt_tokens_mean == 10
    assert level.tokens_from_usage


def test_failures_are_counted_by_reason_and_not_measured() -> None:
    samples = [
        _sample(0.0, [9.0, 19.0], 2, failure="HTTP 500: boom"),
        _sample(0.0, [9.0], 1, failure="HTTP 500: boom"),
        _sample(0.0, [], 0, failure="timeout"),
        _sample(0.0, [0.1], 1),
    ]
    level = summarize("4 at once", samples, duration_s=1.0, unfinished=3)
    assert (level.completed, level.failed, level.unfinished) == (1, 3, 3)
    assert level.failures == {"HTTP 500: boom": 2, "timeout": 1}
    assert level.output_tokens == 1
    assert level.ttft_ms.p99 == pytest.approx(100)
    assert level.itl_ms.median is None
    assert level.tpot_ms.median is None


def test_nothing_completed() -> None:
    level = summarize("1 at once", [], duration_s=0.0, unfinished=1)
    assert level.output_tokens_per_s == 0.0
    assert level.ttft_ms.median is None
    assert not level.tokens_from_usage
