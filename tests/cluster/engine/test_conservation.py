"""Whatever moment a snapshot is taken at, every sequence is in exactly one place and no token is lost or made up.

The rig checks the same after each turn of every test that uses it; here the engine runs in its thread, and another
one looks at it all the time.
"""

import random
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from cluster.engine import recovery
from cluster.engine.loop import Engine
from cluster.engine.stats import EngineStats
from cluster.generation import FinishReason, TokenDelta
from tests.cluster.engine.rig import make_request
from tests.cluster.engine.test_loop import Gate, Inbox, running, scripted, wait_until

_PATIENCE_S = 60.0
_GROWING = (
    "received",
    "prompt_tokens",
    "generation_tokens",
    "preemptions",
    "recoveries",
    "outage_seconds",
    "steps",
)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "_FIRST_PAUSE_S", 0.001)


def check(stats: EngineStats, before: EngineStats) -> None:
    assert stats.received == stats.running + stats.waiting + sum(stats.finished.values())
    assert 0 <= stats.cached_blocks <= stats.free_blocks <= stats.total_blocks
    assert stats.waiting_requests <= stats.waiting
    for name in _GROWING:
        assert getattr(stats, name) >= getattr(before, name), name
    for reason in FinishReason:
        assert stats.finished.get(reason, 0) >= before.finished.get(reason, 0), reason


@contextmanager
def watched(engine: Engine) -> Iterator[None]:
    """Take snapshots as fast as can be, in a thread of its own; what is wrong with one fails the test."""
    over, wrong = threading.Event(), list[AssertionError]()

    def look() -> None:
        before = EngineStats()
        while not over.is_set():
            stats = engine.stats()
            try:
                check(stats, before)
            except AssertionError as error:
                wrong.append(error)
                return
            before = stats

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join(_PATIENCE_S)
    assert not wrong, wrong[0]


class CountingInbox(Inbox):
    """A receiver that asks, with every delivery, whether what it has was counted before it came."""

    engine: Engine
    num_tokens = 0
    behind = 0

    def __call__(self, deltas: Sequence[TokenDelta]) -> None:
        super().__call__(deltas)
        self.num_tokens += sum(len(delta.token_ids) for delta in deltas)
        stats = self.engine.stats()
        self.behind += stats.generation_tokens < self.num_tokens
        self.behind += sum(stats.finished.values()) < len(self.last)


@pytest.mark.parametrize("seed", range(3))
def test_it_adds_up_through_preemptions_deaths_aborts_and_stop_strings(depth: int, seed: int) -> None:
    chance = random.Random(seed)
    inbox = CountingInbox()
    deaths = [chance.randint(10, 60) for _ in range(7)]
    executor = scripted(num_blocks=13, die_at_step=5, next_deaths=deaths)
    with running(executor, inbox, depth=depth, max_recoveries=100) as engine:
        inbox.engine = engine
        with watched(engine):
            for number in range(60):
                prompt, n = chance.randint(1, 12), chance.choice([1, 1, 3])
                engine.submit(make_request(f"r{number}", prompt, chance.randint(1, 30), n=n))
                other = f"r{chance.randint(0, number)}"
                match chance.randint(0, 3):
                    case 0:
                        engine.abort(other, chance.choice([None, 0]))
                    case 1:
                        engine.finish_choice(other, 0)
            assert engine.drain(_PATIENCE_S)
        stats = engine.stats()
        wait_until(lambda: len(inbox.last) == stats.received)

    assert inbox.behind == 0
    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.recoveries == 8
    assert stats.outage_seconds > 0
    assert stats.preemptions > 0
    assert stats.generation_tokens == sum(map(len, inbox.tokens.values()))
    assert Counter(inbox.reasons().values()) == +Counter(stats.finished)


def test_a_choice_that_met_a_stop_string_has_stopped(depth: int) -> None:
    gate, inbox = Gate(), Inbox()
    with running(scripted(next_token=gate), inbox, depth=depth) as engine:
        engine.submit(make_request("r", 3, 4000, n=2))
        assert gate.reached.wait(_PATIENCE_S)
        engine.finish_choice("r", 0)
        engine.abort("r")
        engine.finish_choice("r", 1)  # too late
        gate.open.set()
        assert engine.drain(_PATIENCE_S)
        finished = engine.stats().finished
    assert (finished[FinishReason.STOP], finished[FinishReason.ABORT]) == (1, 1)
    assert inbox.reasons() == {("r", 0): FinishReason.STOP, ("r", 1): FinishReason.ABORT}


def test_heartbeats_are_steps_that_take_no_time_from_the_figures(depth: int) -> None:
    with running(scripted(), Inbox(), depth=depth, heartbeat_interval_s=0.01) as engine:
        wait_until(lambda: engine.stats().steps >= 2)
        assert engine.stats().step_seconds.count == 0
        engine.submit(make_request("r", 3, 4))
        assert engine.drain(_PATIENCE_S)
        stats = engine.stats()
    assert stats.step_seconds.count >= 4
    assert stats.step_seconds.total == stats.step_seconds.count  # a scripted step says that it took a second
    assert stats.busy.forward == stats.step_seconds.count - 1  # the first of them followed none
