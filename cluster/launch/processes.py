"""The processes that write into a folder, and ending them. Knows /proc, and of Ray a file's name.

Everything Ray starts for a session, HAProxy included, has its output or a log open in the session's folder. So
"writes there" finds all of it, even when whoever started it is long gone, and leaves those who only read the logs.
"""

import contextlib
import os
import signal
import stat
import time
from collections.abc import Collection
from pathlib import Path

_PROC = Path("/proc")
_GUESTS_LOG = "python-core-driver-"  # of a program that only connects to the Ray of the folder, beside other files
_POLL_S = 0.05
_KILL_DEADLINE_S = 5.0
_STATE, _PARENT, _THREADS, _STARTED = 0, 1, 17, 19  # places in what `_stat` returns


def processes_writing(folder: Path) -> list[int]:
    """Pids of this user's processes, other than this one, that have a file in `folder` open for writing.

    Not those of users' programs: they have the log of a driver there.
    """
    return [
        pid
        for pid in map(int, filter(str.isdigit, os.listdir(_PROC)))
        if pid != os.getpid() and _writes(_PROC / str(pid), f"{folder}/")
    ]


def _writes(process: Path, prefix: str) -> bool:
    try:
        if process.stat().st_uid != os.geteuid():
            return False
        written = [target for each in (process / "fd").iterdir() if (target := _written(each)).startswith(prefix)]
    except OSError:
        return False  # it ended meanwhile, or is not ours to look at
    return bool(written) and not any(os.path.basename(target).startswith(_GUESTS_LOG) for target in written)


def _written(descriptor: Path) -> str:
    """The path of what is open for writing, or an empty one."""
    try:
        return os.readlink(descriptor) if descriptor.lstat().st_mode & stat.S_IWUSR else ""
    except OSError:
        return ""


def end_processes(folder: Path, *, grace_s: float) -> list[str]:
    """Ask the writers of `folder` to end, wait `grace_s` for them, then SIGKILL them. Names the killed.

    Most end already when whoever started them does; HAProxy has to be asked. When this returns they have let go of
    all they held, which is later than their files disappear from /proc: locks among them tell what may be removed.
    """
    writers = _Writers(folder)
    if grace_s:
        for pid in writers.remaining():
            _send(pid, signal.SIGTERM)
    remaining = writers.wait_gone(grace_s)
    killed = [name_of(pid) for pid in remaining]
    deadline = time.monotonic() + _KILL_DEADLINE_S
    while remaining and time.monotonic() < deadline:  # a daemon may start another before it is its turn
        for pid in remaining:
            _send(pid, signal.SIGKILL)
        remaining = writers.wait_gone(2 * _POLL_S)
    return killed


class _Writers:
    """Those seen writing into `folder`, each until its process is gone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: dict[int, str] = {}  # when each started, to know a later process with its pid

    def remaining(self) -> list[int]:
        for pid in processes_writing(self._folder):
            if (started := _started(pid)) is not None:
                self._seen[pid] = started
        self._seen = {pid: started for pid, started in self._seen.items() if _started(pid) == started}
        return list(self._seen)

    def wait_gone(self, timeout_s: float) -> list[int]:
        deadline = time.monotonic() + timeout_s
        while (remaining := self.remaining()) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return remaining


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def name_of(pid: int) -> str:
    """What people call the process: its short name and pid."""
    try:
        return f"{(_PROC / str(pid) / 'comm').read_text().strip()} (pid {pid})"
    except OSError:
        return f"pid {pid}"


def children_named(names: Collection[str]) -> list[int]:
    """Pids of this process's own children with one of these short names."""
    own = str(os.getpid())
    return [
        pid
        for pid in map(int, filter(str.isdigit, os.listdir(_PROC)))
        if (fields := _stat(pid)) is not None and fields[_PARENT] == own and name_of(pid).split(" ")[0] in names
    ]


def is_running(pid: int) -> bool:
    """Whether the process is there and not a zombie."""
    return _started(pid) is not None


def _started(pid: int) -> str | None:
    """When the process started, in ticks since boot, or None when it is gone or a zombie.

    One whose first thread has ended looks like a zombie, yet is none while it has others.
    """
    fields = _stat(pid)
    if fields is None or (fields[_STATE] == "Z" and int(fields[_THREADS]) <= 1):
        return None
    return fields[_STARTED]


def _stat(pid: int) -> list[str] | None:
    """State, parent and so on: what follows the name, which may hold anything, in /proc/PID/stat."""
    with contextlib.suppress(OSError):
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return None
