"""Spares without processes: when one is started, who gets it, and what its death does."""

from collections.abc import Sequence

import pytest

from cluster.driver import spares as spares_module
from cluster.driver.actor_process import ActorProcess
from cluster.driver.placement import Seat
from cluster.driver.spares import Spares, SpareState
from tests.fakes.worker_configs import tiny_worker_config
from workers.config import WorkerConfig

CONFIG = tiny_worker_config("/model", 3)
SEATS = (Seat(0, 0, "here"), Seat(1, 2, "here"), Seat(2, 1, "there"))


class FakeSpare:
    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self.name = f"the spare in bundle {seat.bundle_index}"
        self.now = SpareState.STARTING
        self.answers = True
        self.taken_for: int | None = None
        self.ended = False

    def state(self) -> SpareState:
        return self.now

    def take(self, seat: Seat, config: WorkerConfig) -> ActorProcess | None:
        if not self.answers:
            self.end()
            return None
        self.taken_for = seat.rank
        return ActorProcess(self)

    def end(self) -> None:
        self.ended = True


class Rig:
    """`spares` looks when it is told to; its own thread is kept from it."""

    def __init__(self, seats: Sequence[Seat] = SEATS) -> None:
        self.now = 100.0
        self.started: list[FakeSpare] = []
        self.spares = Spares(seats, self._start, clock=lambda: self.now)

    def _start(self, seat: Seat) -> FakeSpare:
        self.started.append(FakeSpare(seat))
        return self.started[-1]

    def after(self, seconds: float) -> list[FakeSpare]:
        """Those that are started after that time."""
        self.now += seconds
        before = len(self.started)
        self.spares.look()
        return self.started[before:]

    def ready(self) -> list[FakeSpare]:
        self.spares.resume()
        started = self.after(2.0)
        for spare in started:
            spare.now = SpareState.READY
        return started


@pytest.fixture(autouse=True)
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spares_module, "_LOOK_S", 3600.0)


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_one_a_node_is_started_once_the_group_has_served_for_a_moment(rig: Rig) -> None:
    assert rig.after(1000.0) == []
    rig.spares.resume()
    assert rig.after(1.9) == []
    assert [(spare.seat.node_id, spare.seat.bundle_index) for spare in rig.after(0.1)] == [
        ("there", 1),
        ("here", 0),
    ]
    assert rig.after(1000.0) == []
    rig.spares.end()


def test_it_takes_a_seat_on_its_node_and_the_next_one_comes_when_the_group_serves_again(rig: Rig) -> None:
    there, here = rig.ready()
    rig.spares.pause()

    process = rig.spares.take(SEATS[1], CONFIG)
    assert process is not None
    assert process.actor is here
    assert here.taken_for == 1
    assert rig.spares.take(SEATS[0], CONFIG) is None, "two died: the other is started anew"
    assert rig.after(1000.0) == [], "not while ranks are replayed"

    rig.spares.resume()
    assert [spare.seat.node_id for spare in rig.after(2.0)] == ["here"]
    assert [there.ended, here.ended] == [False, False]
    rig.spares.end()
    assert [there.ended, here.ended] == [True, False], "one is a rank now"


def test_one_that_still_imports_is_left_alone(rig: Rig) -> None:
    rig.spares.resume()
    _, here = rig.after(2.0)
    assert rig.spares.take(SEATS[0], CONFIG) is None
    here.now = SpareState.READY
    assert rig.spares.take(SEATS[0], CONFIG) is not None
    rig.spares.end()


def test_a_lost_one_is_replaced_after_longer_and_longer_pauses() -> None:
    rig = Rig(SEATS[:1])
    rig.spares.resume()
    (spare,) = rig.after(2.0)
    pauses = []
    for _ in range(10):
        spare.now = SpareState.LOST
        assert rig.spares.take(SEATS[0], CONFIG) is None
        lost_at = rig.now
        while not (started := rig.after(1.0)):
            assert spare.ended
        (spare,) = started
        pauses.append(rig.now - lost_at - 1.0)
    assert pauses == [2, 4, 8, 16, 32, 64, 128, 256, 300, 300]

    spare.now = SpareState.READY
    assert rig.spares.take(SEATS[0], CONFIG) is not None
    rig.spares.resume()
    assert len(rig.after(2.0)) == 1, "one that was of use ends the pauses"
    rig.spares.end()


def test_one_that_does_not_answer_is_given_up(rig: Rig) -> None:
    _, here = rig.ready()
    here.answers = False
    assert rig.spares.take(SEATS[0], CONFIG) is None
    assert here.ended
    assert rig.after(1.9) == []
    assert len(rig.after(0.1)) == 1
    rig.spares.end()


def test_nothing_is_left_and_nothing_comes_after_the_end(rig: Rig) -> None:
    started = rig.ready()
    rig.spares.end()
    rig.spares.end()
    assert all(spare.ended for spare in started)
    rig.spares.resume()
    assert rig.after(1000.0) == []
    assert rig.spares.take(SEATS[0], CONFIG) is None


def test_without_seats_there_is_none() -> None:
    rig = Rig(())
    rig.spares.resume()
    assert rig.after(1000.0) == []
    assert rig.spares.take(SEATS[0], CONFIG) is None
    rig.spares.end()


def test_its_own_thread_starts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spares_module, "_LOOK_S", 0.001)
    rig = Rig()
    rig.spares.resume()
    rig.now += 2.0
    for _ in range(20_000):
        if len(rig.started) == 2:
            break
        rig.spares._ended.wait(0.001)
    assert len(rig.started) == 2
    rig.spares.end()
    assert all(spare.ended for spare in rig.started)
