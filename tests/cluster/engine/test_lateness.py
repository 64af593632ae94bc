"""When ranks are taken for stuck: judged by the steps before, with a clock of our own."""

import pytest

from cluster.engine.config import EngineConfig
from cluster.engine.lateness import Lateness
from workers.protocol import KnownSequence, SequenceId, StepPlan

HEARTBEAT = StepPlan(0, 0)


def step(num_tokens: int) -> StepPlan:
    return StepPlan(0, 0, known=(KnownSequence(SequenceId(1), num_tokens),))


class Rig:
    def __init__(self) -> None:
        self.now = 100.0
        self.lateness = Lateness(EngineConfig(max_model_len=100), lambda: self.now)

    def take(self, plan: StepPlan, seconds: float) -> None:
        self.lateness.begin(plan)
        self.now += seconds
        self.lateness.end()

    def late_after_s(self, plan: StepPlan, most_s: float = 1000.0) -> float | None:
        """When this plan is late, to a tenth of a second; None when it is not within `most_s`."""
        self.lateness.begin(plan)
        started, found = self.now, None
        for tenth in range(1, int(most_s * 10)):
            self.now = started + tenth / 10
            if self.lateness.cause is not None:
                found = tenth / 10
                break
        self.lateness.forget()
        return found


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_heartbeat_is_late_after_its_time(rig: Rig) -> None:
    assert rig.late_after_s(HEARTBEAT) == 0.8


def test_the_first_step_is_never_late(rig: Rig) -> None:
    assert rig.late_after_s(step(1)) is None


def test_a_short_step_has_two_seconds(rig: Rig) -> None:
    rig.take(step(8), 0.05)
    assert rig.late_after_s(step(8)) == 2.1


def test_a_long_step_has_three_times_what_the_longest_took(rig: Rig) -> None:
    rig.take(step(8), 4.0)
    rig.take(step(8), 0.1)
    assert rig.late_after_s(step(8)) == pytest.approx(3 * 4.0 * 0.98, abs=0.11)


def test_a_step_with_more_tokens_has_more_time(rig: Rig) -> None:
    rig.take(step(8), 1.0)
    assert rig.late_after_s(step(80)) == pytest.approx(30, abs=0.11)
    assert rig.late_after_s(step(1)) == pytest.approx(3, abs=0.11)


def test_what_was_long_ago_is_forgotten(rig: Rig) -> None:
    rig.take(step(8), 10.0)
    for _ in range(300):
        rig.take(step(8), 0.05)
    assert rig.late_after_s(step(8)) == 2.1


def test_nothing_awaited_is_not_late(rig: Rig) -> None:
    causes = []
    rig.take(step(8), 0.05)
    rig.now += 1000
    causes.append(rig.lateness.cause)
    rig.lateness.begin(step(8))
    rig.now += 1000
    causes.append(rig.lateness.cause)
    rig.lateness.forget()
    causes.append(rig.lateness.cause)
    assert causes == [None, "the ranks have not answered a step for 1000.0 s", None]
