"""What the workers' time says: the share in which they waited for the driver."""

import pytest

from cluster.engine.stats import Counters, EngineStats
from workers.protocol import StepTimings


def test_wait_share_is_of_the_whole_wall_time() -> None:
    counters = Counters()
    counters.count_timings(StepTimings(wait=1, prepare=1, forward=4, collectives=1, sample=1), at_once=True)
    counters.count_timings(StepTimings(wait=3, forward=1), at_once=True)
    counters.count_timings(StepTimings(wait=100, forward=1), at_once=False)
    assert counters.busy == StepTimings(wait=4, prepare=1, forward=5, collectives=1, sample=1)
    assert EngineStats(busy=counters.busy).worker_wait_share == pytest.approx(4 / 12)
    assert counters.step_seconds.snapshot().total == 7 + 1 + 1


def test_nothing_ran_nothing_waited() -> None:
    assert EngineStats().worker_wait_share == 0
