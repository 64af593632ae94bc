"""Snapshots as metric families of Prometheus: every name we export, with what it counts.

A family is made from snapshots when it is asked for, so what one scrape says belongs together: counters that each
count for themselves could not promise that. Knows names and snapshots; knows nothing of HTTP or of who counts.
"""

from collections.abc import Callable, Iterator, Mapping
from math import inf
from operator import attrgetter

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from cluster.engine.stats import EngineStats
from cluster.metrics.histogram import HistogramSnapshot
from cluster.metrics.serving_meter import ServingStats

_PREFIX = "shardserve_"

# Name, field of the stats, what it counts.
_COUNTERS = (
    ("requests_received", "received", "Requests taken in; one with n choices counts n, here and below"),
    ("preemptions", "preemptions", "Times a running request was put back into the queue"),
    ("recoveries", "recoveries", "Times lost ranks were brought back"),
    ("outage_seconds", "outage_seconds", "Seconds without a token in outages of the ranks that are over"),
    ("prompt_tokens", "prompt_tokens", "Tokens of the prompts taken in, whatever their n"),
    ("generation_tokens", "generation_tokens", "Tokens made and handed out"),
    ("prefix_cache_queries", "prefix_cache_queries", "Tokens of prompts that were looked up"),
    ("prefix_cache_hits", "prefix_cache_hits", "Tokens of prompts that were found"),
)
_GAUGES = (
    ("requests_running", "running", "Requests that the ranks hold"),
    ("requests_waiting", "waiting", "Requests in the queue, preempted ones included"),
)

_ByLabel = Callable[[EngineStats], Mapping[str, float]]


class EngineFamilies(Collector):
    """One snapshot of each engine, by its driver. Always, of each: received = running + waiting + all that
    finished, and the states of KV blocks sum to the pool.
    """

    def __init__(self, stats: Mapping[str, EngineStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        for name, field, what in _COUNTERS:
            counter = CounterMetricFamily(_PREFIX + name, what, labels=["driver"])
            for driver, stats in self._stats.items():
                counter.add_metric([driver], attrgetter(field)(stats))
            yield counter
        for name, field, what in _GAUGES:
            gauge = GaugeMetricFamily(_PREFIX + name, what, labels=["driver"])
            for driver, stats in self._stats.items():
                gauge.add_metric([driver], attrgetter(field)(stats))
            yield gauge
        what = "Requests that ended: by a stop, at their length, by the client's abort, or by a failure of ours"
        yield self._labelled(CounterMetricFamily, "requests_finished", what, "reason", _finished)
        what = "KV blocks: used by requests; of the free ones, cached (a prefix to be found) or not"
        yield self._labelled(GaugeMetricFamily, "kv_blocks", what, "state", _blocks)
        what = "Where rank 0's wall time went, in steps that followed another at once; wait is for the driver"
        yield self._labelled(CounterMetricFamily, "worker_seconds", what, "part", _worker_seconds)
        steps = {driver: stats.step_seconds for driver, stats in self._stats.items()}
        yield _histogram("step_seconds", "What a step took on rank 0", "driver", steps)

    def _labelled(
        self,
        kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
        name: str,
        what: str,
        label: str,
        values: _ByLabel,
    ) -> Metric:
        family = kind(_PREFIX + name, what, labels=["driver", label])
        for driver, stats in self._stats.items():
            for value, count in values(stats).items():
                family.add_metric([driver, value], count)
        return family


class IngressFamilies(Collector):
    """What one ingress says of itself, under its own name: several ingresses each count their own requests."""

    def __init__(self, stats: ServingStats, *, ingress: str, version: str, model: str, available: bool) -> None:
        self._stats = stats
        self._ingress = ingress
        self._build = {"version": version, "model": model}
        self._available = available

    def collect(self) -> Iterator[Metric]:
        stats = self._stats
        yield InfoMetricFamily(f"{_PREFIX}build", "What is served, and by which version", self._build)
        what = "1 while a token can be made, as /health says"
        yield GaugeMetricFamily(f"{_PREFIX}available", what, int(self._available))
        what = "Tokens billed, as `usage` tells them"
        tokens = CounterMetricFamily(f"{_PREFIX}completion_tokens", what, labels=["ingress"])
        tokens.add_metric([self._ingress], stats.completion_tokens)
        yield tokens
        for name, what, snapshot in (
            ("time_to_first_token_seconds", "From submission to the first token", stats.first_token),
            (
                "inter_token_latency_seconds",
                "Between two messages with tokens of one choice",
                stats.next_token,
            ),
            ("e2e_request_latency_seconds", "From submission to the end of the last choice", stats.request),
        ):
            yield _histogram(name, what, "ingress", {self._ingress: snapshot})


def _finished(stats: EngineStats) -> Mapping[str, float]:
    return {reason.value: count for reason, count in stats.finished.items()}


def _blocks(stats: EngineStats) -> Mapping[str, float]:
    return {
        "used": stats.total_blocks - stats.free_blocks,
        "cached": stats.cached_blocks,
        "free": stats.free_blocks - stats.cached_blocks,
    }


def _worker_seconds(stats: EngineStats) -> Mapping[str, float]:
    busy = stats.busy
    return {
        "wait": busy.wait,
        "prepare": busy.prepare,
        "forward": busy.forward,
        "collectives": busy.collectives,
        "sample": busy.sample,
    }


def _histogram(name: str, what: str, label: str, snapshots: Mapping[str, HistogramSnapshot]) -> Metric:
    """Prometheus' buckets are cumulative: each has all values up to its bound."""
    family = HistogramMetricFamily(_PREFIX + name, what, labels=[label])
    for value, snapshot in snapshots.items():
        buckets, below = [], 0
        for bound, count in zip((*snapshot.bounds, inf), snapshot.counts, strict=True):
            below += count
            buckets.append(("+Inf" if bound == inf else str(bound), below))
        family.add_metric([value], buckets, snapshot.total)
    return family
