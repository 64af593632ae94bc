"""The engine in its thread: what callers see, what a failure does, and that nothing outside can hold it up."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from cluster.engine.config import EngineConfig
from cluster.engine.executor import Capacity
from cluster.engine.loop import Engine
from cluster.errors import InvalidRequest, Overloaded, Unavailable
from cluster.generation import FinishReason, TokenDelta
from tests.cluster.engine.rig import Key, counted, make_request
from tests.fakes.scripted_executor import ScriptedExecutor
from workers.protocol import SamplingSettings, StepResult

_PATIENCE_S = 60.0


class Inbox:
    """Collects deltas, and lets a test wait until they satisfy something."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.tokens: dict[Key, list[int]] = {}
        self.last: dict[Key, TokenDelta] = {}

    def __call__(self, deltas: Sequence[TokenDelta]) -> None:
        with self._changed:
            for delta in deltas:
                key = (delta.request_id, delta.choice)
                assert key not in self.last
                self.tokens.setdefault(key, []).extend(delta.token_ids)
                if delta.finish_reason is not None:
                    self.last[key] = delta
            self._changed.notify_all()

    def wait(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, _PATIENCE_S)

    def wait_for_end(self, *keys: Key) -> None:
        self.wait(lambda: all(key in self.last for key in keys))

    def reasons(self) -> dict[Key, FinishReason | None]:
        return {key: delta.finish_reason for key, delta in self.last.items()}


class Gate:
    """A model that makes tokens only while it is open: stops a step in the middle for as long as a test needs."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.reached = threading.Event()

    def __call__(self, token_ids: Sequence[int], sampling: SamplingSettings) -> int:
        self.reached.set()
        assert self.open.wait(_PATIENCE_S)
        return token_ids[-1] + 1


@contextmanager
def running(
    executor: ScriptedExecutor,
    publish: Callable[[Sequence[TokenDelta]], None],
    *,
    depth: int,
    max_waiting_requests: int = 100,
    step_deadline_s: float = 30.0,
    heartbeat_interval_s: float = 30.0,
    eos_token_ids: tuple[int, ...] = (),
    max_recoveries: int = 0,
) -> Iterator[Engine]:
    config = EngineConfig(
        max_model_len=5000,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_waiting_requests=max_waiting_requests,
        max_steps_in_flight=depth,
        step_deadline_s=step_deadline_s,
        heartbeat_interval_s=heartbeat_interval_s,
        eos_token_ids=eos_token_ids,
        max_recoveries=max_recoveries,
    )
    engine = Engine(executor, config, publish)
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()
        assert executor.stopped


def scripted(num_blocks: int = 2000, **settings: object) -> ScriptedExecutor:
    return ScriptedExecutor(Capacity(num_blocks, 4), verify=False, **settings)  # type: ignore[arg-type]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def assert_empty(engine: Engine) -> None:
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.waiting_requests) == (0, 0, 0)
    assert stats.free_blocks == stats.total_blocks
    assert stats.received == sum(stats.finished.values())


def test_many_requests_from_many_threads(depth: int) -> None:
    inbox, executor = Inbox(), scripted(num_blocks=30)
    requests = [make_request(f"r{i}", 5 + i, 30, first=10 * i) for i in range(12)]
    with running(executor, inbox, depth=depth) as engine:
        threads = [threading.Thread(target=engine.submit, args=(request,)) for request in requests]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_PATIENCE_S)
        inbox.wait_for_end(*((request.request_id, 0) for request in requests))
        assert_empty(engine)
        assert engine.stats().generation_tokens == 12 * 30
        assert engine.stats().prompt_tokens == sum(range(5, 17))
        # What ended last is told to the ranks in a step of its own, after its deltas went out.
        wait_until(lambda: executor.mirror == {})
    for request in requests:
        assert inbox.tokens[request.request_id, 0] == counted(request)


def test_stop_token_is_the_last_id(depth: int) -> None:
    inbox = Inbox()
    with running(scripted(), inbox, depth=depth, eos_token_ids=(9,)) as engine:
        engine.submit(make_request("r", 5, 30))
        inbox.wait_for_end(("r", 0))
    assert inbox.tokens["r", 0] == [6, 7, 8, 9]
    assert inbox.last["r", 0].finish_reason is FinishReason.STOP


def test_what_cannot_fit_and_what_runs_already_is_refused(depth: int) -> None:
    gate, inbox = Gate(), Inbox()
    with running(scripted(next_token=gate), inbox, depth=depth) as engine:
        with pytest.raises(InvalidRequest, match="5001 tokens together"):
            engine.submit(make_request("r", 1, 5000))
        engine.submit(make_request("r", 1, 5))
        with pytest.raises(InvalidRequest, match="'r' is running already"):
            engine.submit(make_request("r", 1, 5))
        gate.open.set()
        inbox.wait_for_end(("r", 0))
        engine.submit(make_request("r2", 1, 5))
        inbox.wait_for_end(("r2", 0))
        assert engine.stats().received == 2


def test_overload_counts_requests_not_yet_started(depth: int) -> None:
    gate, inbox = Gate(), Inbox()
    with running(scripted(next_token=gate), inbox, depth=depth, max_waiting_requests=2) as engine:
        engine.submit(make_request("runs", 1, 5, n=4))  # takes all seats
        assert gate.reached.wait(_PATIENCE_S)
        engine.submit(make_request("w1", 1, 5, n=3))
        engine.submit(make_request("w2", 1, 5))
        with pytest.raises(Overloaded, match="2 requests wait already, and the limit is 2") as caught:
            engine.submit(make_request("w3", 1, 5))
        assert caught.value.retry_after_s >= 1.0
        assert engine.stats().waiting_requests == 2
        gate.open.set()
        assert engine.drain(_PATIENCE_S)
        assert_empty(engine)


def test_only_those_without_a_seat_count_as_waiting(depth: int) -> None:
    gate, inbox = Gate(), Inbox()
    with running(scripted(next_token=gate), inbox, depth=depth, max_waiting_requests=2) as engine:
        engine.submit(make_request("runs", 1, 5))
        assert gate.reached.wait(_PATIENCE_S)
        for number in range(3 + 2):  # the other seats, and the limit
            engine.submit(make_request(f"r{number}", 1, 5))
        with pytest.raises(Overloaded, match="2 requests wait already, and the limit is 2"):
            engine.submit(make_request("too many", 1, 5))
        gate.open.set()
        assert engine.drain(_PATIENCE_S)
        assert_empty(engine)


def test_abort_in_any_phase_leaves_nothing(depth: int) -> None:
    gate, inbox = Gate(), Inbox()
    with running(scripted(next_token=gate), inbox, depth=depth) as engine:
        engine.abort("never was")
        engine.submit(make_request("runs", 3, 4000, n=4))
        assert gate.reached.wait(_PATIENCE_S)
        engine.submit(make_request("waits", 3, 4000))
        for _ in range(2):
            engine.abort("runs", 1)
            engine.abort("runs")
            engine.abort("waits")
        gate.open.set()
        inbox.wait_for_end(("waits", 0), *(("runs", choice) for choice in range(4)))
        assert set(inbox.reasons().values()) == {FinishReason.ABORT}
        engine.abort("runs")
        assert engine.drain(_PATIENCE_S)
        assert_empty(engine)  # case 48: the gauges are back as well


def test_a_publish_that_raises_ends_nothing(depth: int, caplog: pytest.LogCaptureFixture) -> None:
    inbox = Inbox()
    calls = []

    def publish(deltas: Sequence[TokenDelta]) -> None:
        calls.append(deltas)
        inbox(deltas)
        raise RuntimeError("receiver is broken")

    with caplog.at_level(logging.CRITICAL), running(scripted(), publish, depth=depth) as engine:
        engine.submit(make_request("r", 3, 20))
        inbox.wait_for_end(("r", 0))
        assert engine.failure is None
    assert inbox.tokens["r", 0] == list(range(4, 24))


def test_a_publish_that_blocks_holds_up_no_step(depth: int) -> None:
    inbox, release = Inbox(), threading.Event()

    def publish(deltas: Sequence[TokenDelta]) -> None:
        assert release.wait(_PATIENCE_S)
        inbox(deltas)

    with running(scripted(), publish, depth=depth) as engine:
        engine.submit(make_request("r", 3, 50))
        assert engine.drain(_PATIENCE_S)  # all steps ran while the first call hangs
        assert engine.stats().generation_tokens == 50
        release.set()
        inbox.wait_for_end(("r", 0))
    assert inbox.tokens["r", 0] == list(range(4, 54))


@pytest.mark.parametrize("how", [{"die_at_step": 5}, {"die_on_submit": 5}])
def test_without_restarts_a_death_tells_every_request_once(depth: int, how: dict[str, int]) -> None:
    inbox, executor = Inbox(), scripted(**how)
    with running(executor, inbox, depth=depth) as engine:
        engine.submit(make_request("r", 3, 100, n=6))
        inbox.wait_for_end(*(("r", choice) for choice in range(6)))
        assert {delta.finish_reason for delta in inbox.last.values()} == {FinishReason.ERROR}
        assert all("the worker group failed: scripted" in (delta.error or "") for delta in inbox.last.values())
        assert engine.failure is not None
        with pytest.raises(Unavailable, match="scripted"):
            engine.submit(make_request("late", 3, 5))
        assert engine.drain(1.0)
        assert_empty(engine)
        assert engine.stats().finished[FinishReason.ERROR] == 6


def test_a_step_past_its_deadline_is_a_failure(depth: int) -> None:
    inbox = Inbox()
    with running(scripted(step_time_s=30.0), inbox, depth=depth, step_deadline_s=0.05) as engine:
        engine.submit(make_request("r", 3, 5))
        inbox.wait_for_end(("r", 0))
        assert "no result within 0.05 s" in (engine.failure or "")


def test_a_bug_is_a_failure_and_not_a_silent_end(depth: int, caplog: pytest.LogCaptureFixture) -> None:
    inbox = Inbox()

    def broken(token_ids: Sequence[int], sampling: SamplingSettings) -> int:
        raise ZeroDivisionError("a bug")

    with caplog.at_level(logging.CRITICAL), running(scripted(next_token=broken), inbox, depth=depth) as engine:
        engine.submit(make_request("r", 3, 5))
        inbox.wait_for_end(("r", 0))
        assert engine.failure == "the engine failed: ZeroDivisionError: a bug"


def test_an_idle_engine_proves_that_the_ranks_live(depth: int) -> None:
    executor = scripted(die_at_step=3)
    with running(executor, Inbox(), depth=depth, heartbeat_interval_s=0.01) as engine:
        engine._thread.join(_PATIENCE_S)
        assert "died in step 3" in (engine.failure or "")
        assert engine.stats().steps == 3
    assert all(not plan.new and not plan.known for plan in executor.executed)


class Held(ScriptedExecutor):
    """Results are held back while `open` is clear; `deadlines` are those that the engine gave."""

    def __init__(self) -> None:
        super().__init__(Capacity(100, 4), verify=False)
        self.open = threading.Event()
        self.deadlines: list[float] = []

    def take_result(self, timeout_s: float) -> StepResult:
        self.deadlines.append(timeout_s)
        assert self.open.wait(_PATIENCE_S)
        return super().take_result(timeout_s)


def test_a_late_heartbeat_makes_health_false_long_before_it_is_a_failure(depth: int) -> None:
    executor, now = Held(), [100.0]
    config = EngineConfig(max_model_len=100, max_steps_in_flight=depth, heartbeat_interval_s=0.001)
    engine = Engine(executor, config, Inbox(), clock=lambda: now[0])
    engine.start()
    try:
        wait_until(lambda: bool(executor.deadlines))
        health = []
        for _ in range(2):
            now[0] += 0.4
            health.append(engine.unavailable_because)
        assert health == [None, "the ranks have not answered a heartbeat for 0.8 s"]
        executor.open.set()
        wait_until(lambda: engine.unavailable_because is None)
    finally:
        engine.stop()


def test_ranks_that_hang_in_a_step_make_health_false_long_before_it_is_a_failure(depth: int) -> None:
    executor, inbox, now = Held(), Inbox(), [100.0]
    executor.open.set()
    config = EngineConfig(max_model_len=100, max_steps_in_flight=depth, heartbeat_interval_s=30.0)
    engine = Engine(executor, config, inbox, clock=lambda: now[0])
    engine.start()
    try:
        engine.submit(make_request("first", 3, 5))
        inbox.wait_for_end(("first", 0))
        executor.open.clear()
        num_taken = len(executor.deadlines)
        engine.submit(make_request("second", 3, 5))
        wait_until(lambda: len(executor.deadlines) > num_taken)
        health = []
        for _ in range(2):
            now[0] += 1.5
            health.append(engine.unavailable_because)
        assert health == [None, "the ranks have not answered a step for 3.0 s"]
        executor.open.set()
        inbox.wait_for_end(("second", 0))
        assert engine.unavailable_because is None
    finally:
        executor.open.set()
        engine.stop()


def test_a_heartbeat_has_a_deadline_of_its_own(depth: int) -> None:
    executor, inbox = Held(), Inbox()
    executor.open.set()
    with running(executor, inbox, depth=depth, step_deadline_s=500.0) as engine:
        engine.prove()
        wait_until(lambda: engine.stats().steps == 1)
        engine.submit(make_request("r", 3, 1))
        inbox.wait_for_end(("r", 0))
        wait_until(lambda: engine.stats().steps == 3)
    assert executor.deadlines == [10.0, 500.0, 10.0]


def test_drain_lets_running_requests_finish_and_refuses_new_ones(depth: int) -> None:
    gate, inbox = Gate(), Inbox()
    with running(scripted(next_token=gate), inbox, depth=depth) as engine:
        engine.submit(make_request("r", 3, 20))
        assert not engine.drain(0.01)
        with pytest.raises(Unavailable, match="draining"):
            engine.submit(make_request("late", 3, 5))
        gate.open.set()
        assert engine.drain(_PATIENCE_S)
        inbox.wait_for_end(("r", 0))
        assert inbox.last["r", 0].finish_reason is FinishReason.LENGTH


def test_stop_ends_what_runs_with_an_error_and_is_idempotent(depth: int) -> None:
    gate, inbox, executor = Gate(), Inbox(), scripted()
    executor.next_token = gate
    with running(executor, inbox, depth=depth) as engine:
        engine.submit(make_request("runs", 3, 4000))
        assert gate.reached.wait(_PATIENCE_S)
        engine.submit(make_request("queued", 3, 4000))
        stopper = threading.Thread(target=engine.stop)
        stopper.start()
        gate.open.set()
        stopper.join(_PATIENCE_S)
        engine.stop()
        assert inbox.reasons() == {("runs", 0): FinishReason.ERROR, ("queued", 0): FinishReason.ERROR}
        assert engine.failure is None
        with pytest.raises(Unavailable):
            engine.submit(make_request("late", 3, 5))
        assert_empty(engine)


def test_an_engine_that_never_started_refuses_and_stops() -> None:
    executor = scripted()
    engine = Engine(executor, EngineConfig(max_model_len=100), Inbox())
    with pytest.raises(Unavailable, match="has not started"):
        engine.submit(make_request("r", 3, 5))
    engine.stop()
    engine.stop()
    assert executor.stopped
