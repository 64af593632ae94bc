"""Counting by size, with the bounds where Prometheus has them."""

from cluster.metrics.histogram import Histogram, HistogramSnapshot


def test_a_value_at_a_bound_is_within_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5, 100.0):
        histogram.observe(value)
    assert histogram.snapshot() == HistogramSnapshot((1.0, 2.0), (2, 2, 2), 107.5)
    assert histogram.snapshot().count == 6


def test_a_snapshot_does_not_change_any_more() -> None:
    histogram = Histogram((1.0,))
    before = histogram.snapshot()
    histogram.observe(0.1)
    assert before.count == 0
