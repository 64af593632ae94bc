"""What is said of a rank that does not answer: the cause, in one line, with the rank's name."""

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    OutOfMemoryError,
    RayTaskError,
)

from cluster.driver import rank as rank_module
from cluster.driver import ranks as ranks_module
from cluster.driver.actor_process import ActorProcess
from cluster.driver.placement import Seat
from cluster.driver.rank import Rank
from cluster.driver.ranks import _why
from cluster.errors import StartupFailed
from workers.errors import GroupBroken, OutOfMemory
from workers.reports import CodeIdentity, WorkerIdentity

NAME = "rank 1 (pid 77 on 10.0.0.2)"
IDENTITY = WorkerIdentity(1, 77, "there", "10.0.0.2", "host", CodeIdentity("1", ()))
OOM = (
    "Memory on the node was 22.8GB / 23.5GB (0.97), which exceeds the threshold of 0.95.\nTop 10 memory users: ..."
)


class FakeGuard:
    def __init__(self, words: str | None) -> None:
        self._words = words

    def last_words(self, pid: int) -> str | None:
        assert pid == 77
        return self._words


def far_rank(words: str | None) -> Rank:
    guard: Any = FakeGuard(words)
    return Rank(Seat(1, 1, "there"), ActorProcess(None, 77, guard=guard), IDENTITY)


def raised_by(cause: Exception) -> RayTaskError:
    return RayTaskError("load", f"Traceback\n{cause!r}", cause)


def died(detail: str) -> ActorDiedError:
    error = ActorDiedError()
    error.error_msg = (
        f"The actor died unexpectedly.\n\tpid: 77\nWorker exit detail: {detail} Some common causes include: ..."
    )
    return error


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ref is what `ray.get` raises or returns."""

    def get(ref: Any, timeout: float) -> Any:
        if isinstance(ref, BaseException):
            raise ref
        return ref

    fake = SimpleNamespace(get=get, wait=lambda refs, timeout: (refs, []))
    monkeypatch.setattr(rank_module, "ray", fake)
    monkeypatch.setattr(ranks_module, "ray", fake)


@pytest.mark.parametrize(
    ("error", "words", "said"),
    [
        (raised_by(OutOfMemory("no memory for it")), None, f"{NAME} could not load: no memory for it"),
        (raised_by(GroupBroken("rank 0 is gone")), None, f"{NAME} could not load: rank 0 is gone"),
        (raised_by(MemoryError()), None, f"{NAME} could not load: MemoryError: "),
        (raised_by(RuntimeError("why\nframe #0")), None, f"{NAME} could not load: RuntimeError: why"),
        (GetTimeoutError(), None, f"{NAME}: the answer to load is lost"),
        (
            OutOfMemoryError(OOM),
            "was ended by SIGKILL",
            f"{NAME} was ended by Ray, whose limit of memory the node has reached: {OOM.splitlines()[0]}; "
            f"that was before it could load",
        ),
        (
            ActorDiedError(raised_by(ImportError("libgomp.so.1: failed to map segment"))),
            None,
            f"{NAME} failed to start: ImportError('libgomp.so.1: failed to map segment'); "
            f"that was before it could load",
        ),
        (
            died("Connection error code 2."),
            "was ended by SIGKILL; its last lines: x",
            f"{NAME} was ended by SIGKILL; its last lines: x; that was before it could load",
        ),
        (
            died("Connection error code 2."),
            None,
            f"{NAME} has ended: Connection error code 2; that was before it could load",
        ),
        (
            ActorUnavailableError("the node is gone\nmore", b"0" * 16),
            None,
            f"{NAME} has ended: The actor",
        ),
    ],
)
def test_why_there_is_no_answer(answers: None, error: Exception, words: str | None, said: str) -> None:
    with pytest.raises(StartupFailed) as failed:
        far_rank(words).answer("load", error)
    assert str(failed.value).startswith(said)
    assert "\n" not in str(failed.value)


def test_an_answer_is_an_answer(answers: None) -> None:
    assert far_rank(None).answer("load", 5) == 5


@pytest.mark.parametrize(
    ("running", "words", "dead", "said"),
    [
        (died("Connection error code 2."), "was ended by SIGSEGV", True, f"{NAME} was ended by SIGSEGV"),
        (died("Connection error code 2."), None, True, f"{NAME} has ended: Connection error code 2"),
        (OutOfMemoryError(OOM), None, True, f"{NAME} was ended by Ray, whose limit of memory"),
        (raised_by(GroupBroken("a peer")), None, False, f"{NAME} left its loop: a peer"),
        ("the driver stopped this incarnation", None, False, f"{NAME} left its loop: the driver stopped"),
    ],
)
def test_how_a_rank_on_another_node_ended(
    answers: None, running: Any, words: str | None, dead: bool, said: str
) -> None:
    rank = far_rank(words)
    assert not rank.has_died()
    assert rank.end_in_words() is None
    rank.running = running
    assert rank.has_died() is dead
    assert str(rank.end_in_words()).startswith(said)


def test_ray_says_why_it_has_ended_a_rank_that_the_kernel_saw_end(answers: None) -> None:
    rank = far_rank("was ended by SIGKILL")
    assert "whose limit of memory" in _why(rank, "load", {OutOfMemoryError(OOM): rank})
    rank.running = died("Connection error code 2.")
    assert _why(rank, "load", {}) == f"{NAME} was ended by SIGKILL"
