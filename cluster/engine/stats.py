"""What the engine counts, and the snapshot of it that others read.

Knows numbers; knows nothing of metrics formats or of who reads them.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from cluster.engine.outage import OutageReport
from cluster.generation import FinishReason, TokenDelta
from workers.protocol import StepTimings

_RECENT_STEPS = 64


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
    total_blocks: int = 0
    started_requests: int = 0
    received: int = 0
    finished: Mapping[FinishReason, int] = field(default_factory=dict)
    preemptions: int = 0
    recoveries: int = 0  # times the ranks were lost and came back
    last_outage: OutageReport | None = None  # the last one that is over
    prompt_tokens: int = 0  # of requests received, once each
    prefix_cache_queries: int = 0  # prompt tokens of sequences that started and may read the prefix cache
    prefix_cache_hits: int = 0  # of these, tokens found in it
    generation_tokens: int = 0  # that went out
    steps: int = 0
    last_step_at: float = 0.0
    recent: tuple[StepTimings, ...] = field(
        default=(), repr=False
    )  # of the last steps that followed another at once

    @property
    def mean_timings(self) -> StepTimings:
        count = len(self.recent) or 1
        return StepTimings(
            wait=sum(step.wait for step in self.recent) / count,
            prepare=sum(step.prepare for step in self.recent) / count,
            forward=sum(step.forward for step in self.recent) / count,
            collectives=sum(step.collectives for step in self.recent) / count,
            sample=sum(step.sample for step in self.recent) / count,
        )

    @property
    def worker_wait_share(self) -> float:
        """The share of the ranks' wall time in which they waited for the driver; 0 when nothing ran."""
        mean = self.mean_timings
        total = mean.wait + mean.prepare + mean.forward + mean.collectives + mean.sample
        return mean.wait / total if total else 0.0


class Counters:
    """Everything that only grows, and the timings of the last steps."""

    def __init__(self) -> None:
        self.started_requests = 0
        self.received = 0
        self.finished = dict.fromkeys(FinishReason, 0)
        self.recoveries = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.steps = 0
        self.last_step_at = 0.0
        self.recent: deque[StepTimings] = deque(maxlen=_RECENT_STEPS)

    def count_deltas(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            self.generation_tokens += len(delta.token_ids)
            if delta.finish_reason is not None:
                self.finished[delta.finish_reason] += 1
