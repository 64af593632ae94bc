"""Processes found by what they write, and ended; readers are left alone."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.launch.processes import children_named, end_processes, is_running, name_of, processes_writing

_HOLDS = "import sys, time; f = open(sys.argv[1], sys.argv[2]); print('open', flush=True); time.sleep(60)"
# Asked to end, it closes the file at once and ends a second later.
_LINGERS = (
    "import signal; signal.signal(signal.SIGTERM, lambda *_: (f.close(), time.sleep(1), sys.exit())); " + _HOLDS
)
_SECOND_THREAD = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
print("open", flush=True)
ctypes.PyDLL(None).pthread_exit(None)
"""
_GUEST = "import sys; other = open(sys.argv[1].replace('python', 'event'), 'w'); " + _HOLDS
_STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + _HOLDS


@contextmanager
def _holding(file: Path, mode: str, script: str = _HOLDS) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", script, str(file), mode]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        try:
            yield process
        finally:
            process.kill()


def test_writers_are_found_and_readers_are_not(tmp_path: Path) -> None:
    log = tmp_path / "deep" / "x.log"
    log.parent.mkdir()
    with _holding(log, "a") as writer, _holding(log, "r") as reader:
        found = processes_writing(tmp_path)
        assert writer.pid in found
        assert reader.pid not in found


def test_a_users_program_that_is_connected_is_left_alone(tmp_path: Path) -> None:
    with _holding(tmp_path / "python-core-driver-01_1.log", "a", _GUEST) as guest:
        assert end_processes(tmp_path, grace_s=0) == []
        assert guest.poll() is None


def test_a_folder_whose_name_only_begins_alike_is_another(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run2").mkdir()
    with _holding(tmp_path / "run2" / "x", "w"):
        assert processes_writing(tmp_path / "run") == []


def test_writers_are_killed_when_their_grace_is_over(tmp_path: Path) -> None:
    with _holding(tmp_path / "x", "w", _STUBBORN) as writer, _holding(tmp_path / "x", "r") as reader:
        killed = end_processes(tmp_path, grace_s=0)
        assert len(killed) == 1
        assert f"(pid {writer.pid})" in killed[0]
        assert writer.wait(60) == -9
        assert reader.poll() is None


def test_a_writer_that_has_closed_its_files_is_waited_for_until_it_is_gone(tmp_path: Path) -> None:
    with _holding(tmp_path / "x", "w", _LINGERS) as writer:
        assert end_processes(tmp_path, grace_s=60) == []
        assert not is_running(writer.pid)


def test_a_process_lives_as_long_as_any_of_its_threads(tmp_path: Path) -> None:
    with _holding(tmp_path / "x", "w", _SECOND_THREAD) as process:
        while " (zombie)" not in (Path("/proc") / str(process.pid) / "status").read_text():
            pass  # its first thread is about to end
        assert is_running(process.pid)


def test_nothing_to_end(tmp_path: Path) -> None:
    assert end_processes(tmp_path, grace_s=5) == []


def test_children_and_zombies() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        assert child.pid in children_named(["sleep"])
        assert child.pid not in children_named(["raylet"])
        assert is_running(child.pid)
        assert name_of(child.pid) == f"sleep (pid {child.pid})"
        child.kill()
        while is_running(child.pid):  # a zombie from here on, until it is waited for
            pass
    assert not is_running(child.pid)
    assert name_of(child.pid) == f"pid {child.pid}"
