"""What the engine counts, and the snapshot of it that others read.

Knows numbers; knows nothing of metrics formats or of who reads them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from cluster.engine.outage import OutageReport
from cluster.generation import FinishReason, TokenDelta
from cluster.metrics.histogram import Histogram, HistogramSnapshot
from workers.protocol import StepTimings

_STEP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Consistent in itself: `received == running + waiting + sum(finished)`, counted in sequences.

    A request with n choices is n sequences. `waiting` includes preempted ones. `last_step_at` is on the engine's
    clock. Times are in seconds.
    """

    running: int = 0
    waiting: int = 0
    waiting_requests: int = 0  # of which no choice has started: what `max_waiting_requests` bounds
    free_blocks: int = 0
    cached_blocks: int = 0  # of the free ones, those whose text can still be found
    total_blocks: int = 0
    started_requests: int = 0
    received: int = 0
    finished: Mapping[FinishReason, int] = field(default_factory=dict)
    preemptions: int = 0
    recoveries: int = 0  # times the ranks were lost and came back
    last_outage: OutageReport | None = None  # the last one that is over
    outage_seconds: float = 0.0  # of all that are over
    prompt_tokens: int = 0  # of requests received, once each
    prefix_cache_queries: int = 0  # prompt tokens of sequences that started and may read the prefix cache
    prefix_cache_hits: int = 0  # of these, tokens found in it
    generation_tokens: int = 0  # that went out
    steps: int = 0  # heartbeats included
    last_step_at: float = 0.0
    step_seconds: HistogramSnapshot = field(default_factory=lambda: Histogram(_STEP_S).snapshot())
    busy: StepTimings = field(default_factory=StepTimings)  # summed over steps that followed another at once


class Counters:
    """Everything that only grows."""

    def __init__(self) -> None:
        self.started_requests = 0
        self.received = 0
        self.finished = dict.fromkeys(FinishReason, 0)
        self.recoveries = 0
        self.outage_seconds = 0.0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.steps = 0
        self.last_step_at = 0.0
        self.step_seconds = Histogram(_STEP_S)
        self.busy = StepTimings()

    def count_deltas(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            self.generation_tokens += len(delta.token_ids)
            if delta.finish_reason is not None:
                self.finished[delta.finish_reason] += 1

    def count_timings(self, timings: StepTimings, *, at_once: bool) -> None:
        """Those of a step with sequences. `at_once`: it followed another, so what the ranks waited for was us."""
        self.step_seconds.observe(_computing(timings))
        if at_once:
            busy = self.busy
            self.busy = StepTimings(
                wait=busy.wait + timings.wait,
                prepare=busy.prepare + timings.prepare,
                forward=busy.forward + timings.forward,
                collectives=busy.collectives + timings.collectives,
                sample=busy.sample + timings.sample,
            )


def _computing(timings: StepTimings) -> float:
    return timings.prepare + timings.forward + timings.collectives + timings.sample
