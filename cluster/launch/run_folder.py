"""The one folder that a launch keeps everything in: Ray's session, its sockets, HAProxy's files, the token.

Invariant: while a launcher lives it holds the lock of its folder; a folder without a live holder is abandoned, and
the next start ends the processes that write there and removes it. Knows folders; knows nothing of what is in them.
"""

import atexit
import contextlib
import logging
import os
import secrets
import shutil
import stat
import tempfile
import time
from pathlib import Path

from cluster.launch.processes import end_processes
from workers.ownership import Owned, is_held, reclaim

_log = logging.getLogger(__name__)

_PREFIX = "shardserve-run-"
_OWNER = "launcher"
# Socket paths are short: Ray appends up to 67 characters and may reach 107, HAProxy 59 and 97; our name has 25.
_LONGEST_PARENT = 13
# What ranks and drivers name elsewhere (workers.segment, workers.channel): left behind only when they are killed.
_ELSEWHERE = ((Path("/dev/shm"), "group"), (Path(tempfile.gettempdir()), "steps"))
_YOUNG_S = 60.0  # a folder this young without an owner may be one that is being made


class RunFolder:
    """A folder owned by this process until `close`, or until the process ends."""

    def __init__(self, path: Path, owner: Owned) -> None:
        self.path = path
        self._owner = owner
        self._is_closed = False
        # Ray's own exit hook may write here once more. Hooks run last in, first out: this one after that of a Ray
        # that is imported later, as in a launcher.
        atexit.register(self._remove_what_came_later)

    @classmethod
    def take(cls, parent: Path | None = None) -> "RunFolder":
        path = (parent or default_parent()) / f"{_PREFIX}{secrets.token_hex(4)}"
        path.mkdir(mode=0o700)
        return cls(path, Owned.file(path, _OWNER))

    def close(self, *, grace_s: float) -> list[str]:
        """End what writes there, remove the folder, and name the processes that had to be killed. Idempotent."""
        killed = end_processes(self.path, grace_s=grace_s) if self.path.exists() else []
        self._is_closed = True
        try:
            _remove(self.path)
            _reclaim_elsewhere()
        finally:
            self._owner.close()
        return killed

    def _remove_what_came_later(self) -> None:
        if self._is_closed:
            _remove(self.path)


def default_parent() -> Path:
    """The system's folder for temporary files, or /tmp when socket paths in that one would be too long."""
    chosen = Path(tempfile.gettempdir())
    return chosen if len(str(chosen)) <= _LONGEST_PARENT else Path("/tmp")


def reclaim_abandoned(parent: Path | None = None) -> list[Path]:
    """End and remove what launchers of this user that no longer live have left; returns the folders."""
    reclaimed = []
    for path in (parent or default_parent()).glob(f"{_PREFIX}*"):
        if not _is_abandoned(path):
            continue
        killed = end_processes(path, grace_s=0)
        _remove(path)
        _reclaim_elsewhere()
        reclaimed.append(path)
        _log.info("removed %s of a launcher that is gone, and ended %s", path, ", ".join(killed) or "no process")
    return reclaimed


def live_folders(parent: Path | None = None) -> list[Path]:
    """The private folders of this user's launchers that live."""
    return sorted(path for path in (parent or default_parent()).glob(f"{_PREFIX}*") if _is_live(path))


def _is_live(path: Path) -> bool:
    try:
        state = path.lstat()
    except OSError:
        return False
    return state.st_uid == os.geteuid() and stat.S_IMODE(state.st_mode) == 0o700 and is_held(path, _OWNER)


def _is_abandoned(path: Path) -> bool:
    try:
        state = path.stat()
        if state.st_uid != os.geteuid():
            return False
        if reclaim(path, _OWNER):
            return True
        has_owner = any(path.glob(f"shardserve-{_OWNER}-*"))
    except OSError:
        return False
    return not has_owner and time.time() - state.st_mtime > _YOUNG_S


def _reclaim_elsewhere() -> None:
    for parent, kind in _ELSEWHERE:
        reclaim(parent, kind)


def _remove(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path)
