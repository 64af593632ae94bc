"""The ranks die, at any step, again and again, and while they come back: every output is the undisturbed one."""

import threading
from collections.abc import Callable, Mapping

import pytest

from cluster.engine import recovery
from cluster.engine.executor import ExecutorFailed
from cluster.engine.recovery import RecoveryBudget, Restart
from cluster.errors import Overloaded, Unavailable
from cluster.generation import FinishReason
from tests.cluster.engine.rig import Key, Rig, counted, make_request
from tests.cluster.engine.test_loop import Gate, Inbox, assert_empty, running, scripted
from tests.cluster.engine.test_machine import mixed
from tests.fakes.scripted_executor import ScriptedExecutor

_PATIENCE_S = 60.0

Outcome = tuple[dict[Key, list[int]], dict[Key, FinishReason]]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "_FIRST_PAUSE_S", 0.001)


def scenario(depth: int, prepare: Callable[[ScriptedExecutor], None], num_blocks: int) -> tuple[Rig, Outcome]:
    """Chunked prompts, two and three choices, seeds, stop tokens, late arrivals; with few blocks, preemptions.

    What is aborted has no token yet, wherever the ranks die.
    """
    rig = Rig(
        depth=depth,
        num_blocks=num_blocks,
        max_num_seqs=5,
        max_num_batched_tokens=12,
        eos_token_ids=(7,),
        next_token=mixed,
    )
    prepare(rig.executor)
    rig.add(
        make_request("long", 30, 12, seed=1, ignore_eos=True),
        make_request("pair", 5, 25, seed=2, n=2, ignore_eos=True),
        make_request("never", 4, 40, seed=3, ignore_eos=True),
    )
    rig.abort("never")
    rig.run_until_first_token("long")
    rig.add(make_request("late", 9, 18, seed=4, n=3, stop_token_ids=(3, 11)), make_request("one", 20, 1, seed=5))
    rig.run_until_idle()
    rig.assert_nothing_left()
    return rig, (rig.tokens, rig.reasons)


@pytest.mark.parametrize("num_blocks", [64, 13])
def test_killed_at_every_step(depth: int, num_blocks: int) -> None:
    rig, undisturbed = scenario(depth, lambda executor: None, num_blocks)
    assert (rig.core.stats().preemptions > 0) == (num_blocks == 13)
    steps = len(rig.executor.executed)
    assert steps > 20
    for step in range(steps):

        def die(executor: ScriptedExecutor, step: int = step) -> None:
            executor.die_at_step = step

        rig, disturbed = scenario(depth, die, num_blocks)
        assert rig.core.stats().recoveries == 1
        assert disturbed == undisturbed, f"killed at step {step}"


@pytest.mark.parametrize("num_blocks", [64, 13])
def test_killed_while_a_plan_is_sent(depth: int, num_blocks: int) -> None:
    _, undisturbed = scenario(depth, lambda executor: None, num_blocks)
    for step in range(20):

        def die(executor: ScriptedExecutor, step: int = step) -> None:
            executor.die_on_submit = step

        assert scenario(depth, die, num_blocks)[1] == undisturbed, f"killed while step {step} was sent"


@pytest.mark.parametrize("gap", [1, 2, 3, 7])
def test_killed_again_and_again(depth: int, gap: int) -> None:
    """The 30-token prompt takes three steps, so with a gap of three a replay hardly gets anywhere."""

    def die(executor: ScriptedExecutor) -> None:
        executor.die_at_step = 10
        executor.next_deaths = [gap] * 30

    _, undisturbed = scenario(depth, lambda executor: None, 64)
    rig, disturbed = scenario(depth, die, 64)
    assert rig.core.stats().recoveries > 3
    assert disturbed == undisturbed


def test_what_was_computed_for_nothing_is_not_counted_as_progress(depth: int) -> None:
    rig = Rig(depth=depth)
    rig.add(make_request("r", 5, 20, n=2))
    rig.run_until_first_token("r")
    rig.lose_ranks()
    stats = rig.core.stats()
    assert (stats.running, stats.waiting, stats.waiting_requests) == (0, 2, 0)
    assert not rig.core.idle
    rig.resume()
    rig.run_until_idle()
    rig.assert_nothing_left()
    assert rig.core.stats().generation_tokens == 40
    assert rig.core.stats().prompt_tokens == 5
    assert rig.core.stats().started_requests == 1


def test_clients_see_a_pause_and_nothing_else(depth: int) -> None:
    inbox = Inbox()
    executor = scripted(die_at_step=7, next_deaths=[0, 3, None], failing_restarts=2)
    requests = [make_request(f"r{i}", 5 + 9 * i, 40, first=20 * i, n=1 + i % 2) for i in range(4)]
    with running(executor, inbox, depth=depth, max_recoveries=10) as engine:
        for request in requests:
            engine.submit(request)
        assert engine.drain(_PATIENCE_S)
        inbox.wait_for_end(*((r.request_id, choice) for r in requests for choice in range(r.sampling.n)))
        assert_empty(engine)
        assert engine.stats().recoveries == 3
        assert engine.failure is None
        assert engine.unavailable_because is None
    for request in requests:
        for choice in range(request.sampling.n):
            assert inbox.tokens[request.request_id, choice] == counted(request)
            assert inbox.last[request.request_id, choice].finish_reason is FinishReason.LENGTH
    assert executor.num_restarts == 5


def test_requests_come_and_go_while_the_ranks_are_gone(depth: int) -> None:
    gate = Gate()
    inbox, executor = Inbox(), scripted(die_at_step=9, next_token=gate)
    executor.may_restart.clear()
    with running(executor, inbox, depth=depth, max_recoveries=3, max_waiting_requests=2) as engine:
        engine.submit(make_request("stays", 3, 50))
        engine.submit(make_request("leaves", 3, 50, n=3))
        gate.open.set()  # both are there before the ranks can die
        inbox.wait(lambda: executor.num_restarts == 1 or engine.unavailable_because is not None)
        engine.submit(make_request("comes", 4, 10))
        engine.submit(make_request("comes and leaves", 4, 10))
        with pytest.raises(Overloaded, match="2 requests wait already"):
            engine.submit(make_request("too many", 4, 10))
        engine.abort("leaves", 1)
        engine.abort("comes and leaves")
        inbox.wait_for_end(("leaves", 1), ("comes and leaves", 0))
        engine.abort("leaves")
        inbox.wait_for_end(("leaves", 0), ("leaves", 2))
        assert set(inbox.reasons().values()) == {FinishReason.ABORT}
        assert executor.incarnation == 0
        assert "recovering: scripted: a rank died in step 9" in (engine.unavailable_because or "")
        assert engine.failure is None
        executor.may_restart.set()
        inbox.wait_for_end(("stays", 0), ("comes", 0))
        assert engine.drain(_PATIENCE_S)
        assert_empty(engine)
    assert inbox.tokens["stays", 0] == list(range(4, 54))
    assert inbox.tokens["comes", 0] == list(range(5, 15))


def test_only_a_step_ends_an_outage(depth: int) -> None:
    """An idle engine runs one at once."""
    executor = scripted(die_at_step=0, next_deaths=[0])
    with running(executor, Inbox(), depth=depth, max_recoveries=3) as engine:
        assert engine.unavailable_because is None
        engine.prove()  # the next heartbeat is half a minute away
        wait_until(lambda: engine.stats().recoveries == 2)
        wait_until(lambda: engine.unavailable_because is None)
        assert engine.stats().steps == 1


@pytest.mark.parametrize(("most", "reason"), [(0, "restarts are off"), (2, "after 2 restarts within 300 s")])
def test_ranks_that_do_not_come_back_are_given_up(depth: int, most: int, reason: str) -> None:
    inbox, executor = Inbox(), scripted(die_at_step=5, failing_restarts=100)
    with running(executor, inbox, depth=depth, max_recoveries=most) as engine:
        engine.submit(make_request("r", 3, 100, n=2))
        inbox.wait_for_end(("r", 0), ("r", 1))
        assert {delta.finish_reason for delta in inbox.last.values()} == {FinishReason.ERROR}
        assert reason in (engine.failure or "")
        assert engine.unavailable_because == engine.failure
        with pytest.raises(Unavailable, match="scripted: a rank died"):
            engine.submit(make_request("late", 3, 5))
        assert_empty(engine)
    assert executor.num_restarts == most


def test_ranks_that_die_of_every_step_are_given_up(depth: int) -> None:
    inbox, executor = Inbox(), scripted(die_at_step=0, next_deaths=[0] * 100)
    with running(executor, inbox, depth=depth, max_recoveries=4) as engine:
        engine.submit(make_request("r", 3, 100))
        inbox.wait_for_end(("r", 0))
        wait_until(lambda: engine.failure is not None)
        assert "after 4 restarts" in (engine.failure or "")
    assert executor.incarnation == 4


def test_stats_tell_of_the_last_outage_once_its_clients_go_on(depth: int) -> None:
    inbox, executor = Inbox(), scripted(die_at_step=7, next_deaths=[0, None], failing_restarts=1)
    with running(executor, inbox, depth=depth, max_recoveries=10) as engine:
        assert engine.stats().last_outage is None
        engine.submit(make_request("r", 40, 20))
        inbox.wait_for_end(("r", 0))
        report = engine.stats().last_outage
        assert report is not None
        assert report.cause == "scripted: a rank died in step 0"
        assert [name for name, _ in report.parts] == ["notice", "earlier tries", "script", "replay"]
        assert report.seconds == pytest.approx(sum(seconds for _, seconds in report.parts))
    assert executor.num_restarts == 3


def test_a_bug_in_a_restart_is_not_tried_again(depth: int, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(ScriptedExecutor):
        def restart(self, cancelled: threading.Event) -> Mapping[str, float]:
            raise ZeroDivisionError("a bug")

    inbox, executor = Inbox(), Broken(scripted().capacity, verify=False, die_at_step=2)
    with running(executor, inbox, depth=depth, max_recoveries=4) as engine:
        engine.submit(make_request("r", 3, 100))
        inbox.wait_for_end(("r", 0))
        assert engine.failure == "the engine failed: ZeroDivisionError: a bug"


def test_stop_does_not_wait_for_a_restart(depth: int) -> None:
    inbox, executor = Inbox(), scripted(die_at_step=4)
    executor.may_restart.clear()
    with running(executor, inbox, depth=depth, max_recoveries=4) as engine:
        engine.submit(make_request("r", 3, 100))
        wait_until(lambda: executor.num_restarts == 1)
        engine.stop()
        assert inbox.reasons() == {("r", 0): FinishReason.ERROR}
        assert engine.failure is None
        assert_empty(engine)
    assert executor.incarnation == 0


def test_the_budget_counts_restarts_in_a_window_and_waits_between_failing_ones() -> None:
    budget = RecoveryBudget(most=4, window_s=100)
    pauses = [budget.take(now) for now in (0.0, 1.0, 2.0)]
    assert pauses == [0.0, 0.001, 0.002]
    budget.note_step()
    assert budget.take(50.0) == 0.0
    assert budget.take(99.9) is None
    assert budget.take(100.0) == 0.001
    assert budget.take(100.5) is None
    assert budget.take(101.0) is not None


def test_a_pause_never_grows_without_end() -> None:
    budget = RecoveryBudget(most=10_000, window_s=100)
    assert max(budget.take(0.0) or 0.0 for _ in range(2000)) == 10.0


def test_a_restart_is_cancelled_in_its_pause() -> None:
    executor = scripted()
    restart = Restart(executor, 1000.0, lambda: None)
    restart.start()
    restart.cancel(_PATIENCE_S)
    assert restart.done
    assert isinstance(restart.error, ExecutorFailed)
    assert executor.num_restarts == 0


def wait_until(condition: Callable[[], bool]) -> None:
    """For what no delta announces."""
    done = threading.Event()
    for _ in range(int(_PATIENCE_S / 0.002)):
        if condition():
            return
        done.wait(0.002)
    raise AssertionError("never happened")
