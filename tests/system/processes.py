"""Processes and files of this machine, as the system tests look at them."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path


def descendants(of: int | None = None) -> dict[int, str]:
    """pid -> title of every live process below `of` (this process by default)."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            parent = _parent(int(entry.name))
            if parent is not None:
                parents.setdefault(parent, []).append(int(entry.name))
    found: dict[int, str] = {}
    todo = [of or os.getpid()]
    while todo:
        for child in parents.get(todo.pop(), []):
            found[child] = title(child)
            todo.append(child)
    return found


def only(prefix: str) -> int:
    """The one process below this one whose title starts with `prefix`."""
    pids = all_of(prefix)
    assert len(pids) == 1, f"{len(pids)} processes are called {prefix}: {descendants()}"
    return pids[0]


def all_of(prefix: str) -> list[int]:
    return sorted(pid for pid, name in descendants().items() if name.startswith(prefix))


def parent_of(pid: int) -> int:
    parent = _parent(pid)
    assert parent is not None, f"process {pid} has ended"
    return parent


def marked(marker: str) -> list[int]:
    """Processes that inherited an environment with `marker` in it, wherever their parents have gone."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:  # ended just now, or not ours
            continue
    return found


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return ""


def shared_files() -> set[str]:
    """What is in /dev/shm, and our folders among the temporary files."""
    names = {f"/dev/shm/{name}" for name in os.listdir("/dev/shm")}
    return names | {str(path) for path in Path("/tmp").glob("shardserve-*")}


def wait_until(condition: Callable[[], bool], what: str, deadline_s: float = 150.0) -> None:
    """The default only guards against hanging: on a slow machine a replica takes a minute to start."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {deadline_s} s: {what}"
        time.sleep(0.02)


def _parent(pid: int) -> int | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, parent = text.rpartition(")")[2].split()[:2]
    return None if state == "Z" else int(parent)
