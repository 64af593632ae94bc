"""How a process of this node ended that is not our child, and what it said last.

A rank's parent is Ray's raylet, which does not tell; the kernel does, through the process's pidfd. Knows processes
and log files; knows nothing of ranks.
"""

import fcntl
import os
import signal
import struct
import time
from pathlib import Path

# struct pidfd_info: mask, cgroup, eleven ids, exit code. The code is there once the parent has reaped the process,
# on Linux 6.15 and later.
_PIDFD_INFO = struct.Struct("=QQ11Ii")
_PIDFD_GET_INFO = 3 << 30 | _PIDFD_INFO.size << 16 | 0xFF << 8 | 11
_INFO_EXIT = 1 << 3
_REAPED_WITHIN_S = 0.05
_POLL_S = 0.001
_MOST_BYTES = 4096
_RAY_MARK = ":"  # of lines by which Ray sorts a log file
_LAST_LINES = 5
_VMSTAT = Path("/proc/vmstat")


def last_words(pidfd: int, pid: int, log: str, *, oom_kills_before: int) -> str:
    """How a process ended whose pidfd is readable, and the last lines of its log.

    `oom_kills_before` is what `oom_kills` gave while it was well: whether the kernel has killed for want of memory
    since then.
    """
    ended = how_it_ended(pidfd, pid)
    since = oom_kills() - oom_kills_before
    if "SIGKILL" in ended and since > 0:
        ended += f"; the kernel has killed {since} of this node's processes since it started, for want of memory"
    lines = last_lines(log, _LAST_LINES)
    return ended + ("; its last lines: " + " | ".join(lines) if lines else "")


def oom_kills(vmstat: Path = _VMSTAT) -> int:
    """How many processes of this machine the kernel has killed for want of memory; 0 where it does not tell."""
    try:
        rows = [line.split() for line in vmstat.read_text().splitlines()]
    except OSError:
        return 0
    return next((int(row[1]) for row in rows if row[0] == "oom_kill"), 0)


def how_it_ended(pidfd: int, pid: int) -> str:
    """In words, of a process whose pidfd is readable: "was ended by SIGKILL", "ended with exit code 1"."""
    deadline = time.monotonic() + _REAPED_WITHIN_S
    while True:
        status = _status_by_pidfd(pidfd)
        if status is None:
            status = _status_of_zombie(pid)
        if status is not None:
            return _in_words(status)
        if time.monotonic() > deadline:
            return "has ended, and the kernel does not tell how"
        time.sleep(_POLL_S)


def last_lines(path: str, count: int) -> list[str]:
    """Of a log file; nothing when it cannot be read."""
    try:
        with Path(path).open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _MOST_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    lines = [line.rstrip() for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith(_RAY_MARK)][-count:]


def _status_by_pidfd(pidfd: int) -> int | None:
    info = bytearray(_PIDFD_INFO.pack(_INFO_EXIT, *[0] * 13))
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
    except OSError:
        return None
    mask, *_, exit_code = _PIDFD_INFO.unpack(info)
    return int(exit_code) if mask & _INFO_EXIT else None


def _status_of_zombie(pid: int) -> int | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[-1]) if fields[0] == "Z" else None


def _in_words(status: int) -> str:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        names = {each.value: each.name for each in signal.Signals}
        return f"was ended by {names.get(number, f'signal {number}')}"
    return f"ended with exit code {os.waitstatus_to_exitcode(status)}"
