"""What a guard sees of the processes of its node, and does to them."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from ray.exceptions import GetTimeoutError

from cluster.driver import node_guard
from cluster.driver.node_guard import Guard, NodeGuard
from cluster.driver.placement import Seat

_SAYS = "import sys, time; print('last\\nwords', file=sys.stderr, flush=True); print(flush=True); time.sleep(60)"


@contextmanager
def watched(guard: Guard, log: Path) -> Iterator["subprocess.Popen[str]"]:
    """A process that has said something and sleeps."""
    with log.open("w") as stderr:
        process = subprocess.Popen([sys.executable, "-c", _SAYS], stdout=subprocess.PIPE, stderr=stderr, text=True)
    assert process.stdout is not None
    try:
        process.stdout.readline()
        guard.watch(process.pid, str(log))
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_it_tells_how_a_process_ended_and_what_it_said(tmp_path: Path) -> None:
    guard = Guard()
    with watched(guard, tmp_path / "log") as process:
        assert guard.last_words(process.pid) is None, "it lives"
        process.send_signal(signal.SIGTERM)
        assert guard.last_words(process.pid) == "was ended by SIGTERM; its last lines: last | words"
        assert guard.last_words(process.pid) == "was ended by SIGTERM; its last lines: last | words"


def test_it_ends_one_that_is_stopped(tmp_path: Path) -> None:
    guard = Guard()
    with watched(guard, tmp_path / "log") as process:
        process.send_signal(signal.SIGSTOP)
        guard.kill(process.pid)
        assert str(guard.last_words(process.pid)).startswith("was ended by SIGKILL")
        guard.kill(process.pid)


def test_it_touches_and_tells_of_nobody_else(tmp_path: Path) -> None:
    guard = Guard()
    with watched(Guard(), tmp_path / "log") as process:
        guard.kill(process.pid)
        assert process.poll() is None
        assert guard.last_words(process.pid) is None


def test_those_that_have_ended_cost_no_descriptor(tmp_path: Path) -> None:
    guard = Guard()
    before = len(os.listdir("/proc/self/fd"))
    for number in range(3):
        with watched(guard, tmp_path / f"log{number}"):
            pass
    guard.watch(2**22, "")  # of a pid that nobody has
    assert len(os.listdir("/proc/self/fd")) == before


def test_nobody_waits_twice_for_a_guard_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = 0

    def get(ref: Any, timeout: float) -> Any:
        nonlocal waits
        waits += 1
        raise GetTimeoutError

    monkeypatch.setattr(node_guard, "GuardActor", MagicMock())
    monkeypatch.setattr("ray.get", get)
    guard = NodeGuard(MagicMock(), Seat(1, 1, "there"))
    guard.kill(7)
    assert guard.is_lost
    assert guard.last_words(7) is None
    guard.kill(8)
    assert waits == 1
