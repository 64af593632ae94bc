"""Where the workers' time is counted."""

from cluster.engine.stats import Counters
from workers.protocol import StepTimings


def test_waits_count_only_in_steps_that_followed_another_at_once() -> None:
    counters = Counters()
    counters.count_timings(StepTimings(wait=1, prepare=1, forward=4, collectives=1, sample=1), at_once=True)
    counters.count_timings(StepTimings(wait=3, forward=1), at_once=True)
    counters.count_timings(StepTimings(wait=100, forward=1), at_once=False)
    assert counters.busy == StepTimings(wait=4, prepare=1, forward=5, collectives=1, sample=1)
    assert counters.step_seconds.snapshot().total == 7 + 1 + 1
