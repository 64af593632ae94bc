"""A request that kills the ranks is found and failed; those beside it get what they asked for."""

from collections.abc import Sequence

import pytest

from cluster.engine import recovery
from cluster.engine.executor import ExecutorFailed
from cluster.generation import FinishReason
from tests.cluster.engine.rig import counted, make_request
from tests.cluster.engine.test_loop import Inbox, assert_empty, running, scripted, wait_until
from tests.fakes.scripted_executor import count_up
from workers.protocol import SamplingSettings

_PATIENCE_S = 60.0
_POISON = 666


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "_FIRST_PAUSE_S", 0.001)


def deadly(token_ids: Sequence[int], sampling: SamplingSettings) -> int:
    """No rank survives this token."""
    if _POISON in token_ids:
        raise ExecutorFailed("scripted: a rank died")
    return count_up(token_ids, sampling)


@pytest.mark.parametrize("prompt_ends_at", [_POISON, _POISON - 20], ids=["in its prompt", "in its output"])
def test_it_alone_is_failed_after_four_deaths(depth: int, prompt_ends_at: int) -> None:
    inbox, executor = Inbox(), scripted(next_token=deadly)
    others = [make_request(f"r{i}", 3 + 5 * i, 60, first=50 * i + 1) for i in range(5)]
    deadly_one = make_request("deadly", 10, 60, first=prompt_ends_at - 9, n=2)
    with running(executor, inbox, depth=depth, max_recoveries=4) as engine:
        for request in [*others[:2], deadly_one, *others[2:]]:
            engine.submit(request)
        assert engine.drain(_PATIENCE_S)
        inbox.wait_for_end(*((request.request_id, 0) for request in others), ("deadly", 0), ("deadly", 1))
        assert_empty(engine)
        assert engine.failure is None
    assert executor.num_restarts == 4
    for request in others:
        assert inbox.tokens[request.request_id, 0] == counted(request)
    for choice in range(2):
        last = inbox.last["deadly", choice]
        assert last.finish_reason is FinishReason.ERROR
        assert last.error == (
            "the ranks failed 4 times while they computed this request, and no other the last times: "
            "scripted: a rank died"
        )


def test_it_uses_up_nobody_elses_restarts(depth: int) -> None:
    inbox, executor = Inbox(), scripted(next_token=deadly)
    with running(executor, inbox, depth=depth, max_recoveries=4) as engine:
        for number in range(5):
            engine.submit(make_request(f"deadly {number}", 1, 5, first=_POISON))
            inbox.wait_for_end((f"deadly {number}", 0))
            wait_until(lambda: engine.unavailable_because is None)  # a step has shown that it was to blame
        engine.submit(make_request("r", 3, 10))
        inbox.wait_for_end(("r", 0))
        assert engine.failure is None
    assert inbox.last["r", 0].finish_reason is FinishReason.LENGTH
    assert executor.num_restarts == 20


def test_several_at_once_are_all_found(depth: int) -> None:
    inbox, executor = Inbox(), scripted(next_token=deadly)
    with running(executor, inbox, depth=depth, max_recoveries=10) as engine:
        for number in range(3):
            engine.submit(make_request(f"deadly {number}", 1, 5, first=_POISON))
            engine.submit(make_request(f"r{number}", 3, 30))
        assert engine.drain(_PATIENCE_S)
        inbox.wait_for_end(*((f"{name}{number}", 0) for name in ("deadly ", "r") for number in range(3)))
        assert engine.failure is None
    reasons = inbox.reasons()
    assert {reasons[f"deadly {number}", 0] for number in range(3)} == {FinishReason.ERROR}
    assert {reasons[f"r{number}", 0] for number in range(3)} == {FinishReason.LENGTH}
    assert all(inbox.tokens[f"r{number}", 0] == list(range(4, 34)) for number in range(3))


def test_deaths_on_the_way_are_nobodys_fault(depth: int) -> None:
    """Neither of those who gain a token after each, nor of those who only recompute what once went well."""
    inbox, executor = Inbox(), scripted(die_at_step=4, next_deaths=[4] * 9)
    requests = [make_request(f"r{i}", 3, 60, first=10 * i) for i in range(3)]
    with running(executor, inbox, depth=depth, max_recoveries=20) as engine:
        for request in requests:
            engine.submit(request)
        assert engine.drain(_PATIENCE_S)
        inbox.wait_for_end(*((request.request_id, 0) for request in requests))
    assert executor.num_restarts == 10
    assert set(inbox.reasons().values()) == {FinishReason.LENGTH}
    for request in requests:
        assert inbox.tokens[request.request_id, 0] == counted(request)


def test_deaths_here_and_there_in_a_prompt_are_not_its_fault(depth: int) -> None:
    inbox, executor = Inbox(), scripted(die_at_step=2, next_deaths=[0, 1, 2, 0, 3, 1, None])
    with running(executor, inbox, depth=depth, max_recoveries=20) as engine:
        engine.submit(make_request("r", 16 * 6, 3))
        inbox.wait_for_end(("r", 0))
    assert executor.num_restarts == 7
    assert inbox.tokens["r", 0] == [97, 98, 99]
