"""How real processes ended, and what they said last."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.driver import exits
from cluster.driver.exits import how_it_ended, last_lines, last_words, oom_kills


def ended(program: str, number: int | None = None) -> str:
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert process.stdout is not None
    pidfd = os.pidfd_open(process.pid)
    try:
        process.stdout.readline()
        if number is not None:
            process.send_signal(number)
        assert select.select([pidfd], [], [], 60)[0]
        return how_it_ended(pidfd, process.pid)
    finally:
        os.close(pidfd)
        process.wait()
        process.stdout.close()


def test_a_signal_and_an_exit_code_are_named() -> None:
    waits = "import time; print(flush=True); time.sleep(60)"
    assert ended(waits, signal.SIGKILL) == "was ended by SIGKILL"
    assert ended("print(flush=True); raise SystemExit(3)") == "ended with exit code 3"


def test_what_the_kernel_does_not_tell_is_not_made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exits, "_REAPED_WITHIN_S", 0.0)
    monkeypatch.setattr(exits, "_status_by_pidfd", lambda pidfd: None)
    monkeypatch.setattr(exits, "_status_of_zombie", lambda pid: None)
    assert how_it_ended(-1, 1) == "has ended, and the kernel does not tell how"


def test_the_last_lines_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "worker.err"
    log.write_text(":job_id:01\n" + "x" * 9000 + "\nMemoryError: 12 GiB\n:actor_name:WorkerActor\n\nlast\n")
    assert last_lines(str(log), 2) == ["MemoryError: 12 GiB", "last"]
    assert last_lines(str(tmp_path / "absent"), 2) == []
    assert last_lines("", 2) == []


def test_the_last_words_say_whether_the_kernel_may_have_done_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "worker.err"
    log.write_text("loading\n")
    monkeypatch.setattr(exits, "oom_kills", lambda: 5)
    monkeypatch.setattr(exits, "how_it_ended", lambda pidfd, pid: "was ended by SIGKILL")
    assert last_words(-1, 1, str(log), oom_kills_before=5) == "was ended by SIGKILL; its last lines: loading"
    assert "killed 2 of this node's processes since it started, for want of memory; its last" in last_words(
        -1, 1, str(log), oom_kills_before=3
    )
    monkeypatch.setattr(exits, "how_it_ended", lambda pidfd, pid: "ended with exit code 1")
    assert last_words(-1, 1, "", oom_kills_before=3) == "ended with exit code 1"


def test_the_kernels_count_of_such_kills(tmp_path: Path) -> None:
    table = tmp_path / "vmstat"
    table.write_text("nr_free_pages 5\noom_kill 7\noom_kill_disable 9\n")
    assert oom_kills(table) == 7
    table.write_text("nr_free_pages 5\n")
    assert oom_kills(table) == 0
    assert oom_kills(tmp_path / "absent") == 0
