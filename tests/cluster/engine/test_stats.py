"""What the workers' time says: the share in which they waited for the driver."""

import pytest

from cluster.engine.stats import EngineStats
from workers.protocol import StepTimings


def test_wait_share_is_of_the_whole_wall_time() -> None:
    steps = (StepTimings(wait=1, prepare=1, forward=4, collectives=1, sample=1), StepTimings(wait=3, forward=1))
    stats = EngineStats(recent=steps)
    assert stats.worker_wait_share == pytest.approx(4 / 12)
    assert stats.mean_timings == StepTimings(wait=2, prepare=0.5, forward=2.5, collectives=0.5, sample=0.5)


def test_nothing_ran_nothing_waited() -> None:
    assert EngineStats().worker_wait_share == 0
