"""Names on disk that tell who made them, and clearing away what dead makers left.

Every socket folder and shared-memory file is called `shardserve-<kind>-<boot id>-<pid>-<random>` and its maker
holds a lock on it. The kernel drops the lock with the process, however it ends and whatever PID namespace it lived
in, so "the lock is free" is what says that the owner is dead; boot id and pid are there for the people who look.
What is made is hidden, with a dot before its name, until it is locked: a name that can be seen was never without
its lock while its maker lived. Knows files and locks; knows nothing of what is in them.
"""

import fcntl
import logging
import os
import secrets
import shutil
import time
from pathlib import Path

_log = logging.getLogger(__name__)

_PREFIX = "shardserve"
_HIDDEN_S = 60.0  # from making to locking: a process that takes longer has died between them


class Owned:
    """A file or folder that belongs to this process until `close`, or until the process ends.

    Invariant: while it is open, `path` cannot be reclaimed by another process.
    """

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.fd = fd

    @classmethod
    def folder(cls, parent: Path, kind: str) -> "Owned":
        """A new folder below `parent` that only this user can enter."""
        path = parent / _new_name(kind)
        hidden = _hidden(path)
        hidden.mkdir(mode=0o700)
        return cls(path, _publish(os.open(hidden, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), path))

    @classmethod
    def file(cls, parent: Path, kind: str) -> "Owned":
        """A new empty file below `parent` that only this user can open."""
        path = parent / _new_name(kind)
        fd = os.open(_hidden(path), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        return cls(path, _publish(fd, path))

    def remove(self) -> None:
        """Take the name away; an open file lives on without it. Idempotent."""
        _remove(self.path)

    def close(self) -> None:
        """Remove and let go. Idempotent."""
        self.remove()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def reclaim(parent: Path, kind: str) -> list[Path]:
    """Remove what dead processes of this user left below `parent`, and return it."""
    return [path for path in _left_below(parent, kind) if _reclaim_one(path)]


def is_held(parent: Path, kind: str) -> bool:
    """Whether a process that lives owns something of this kind below `parent`."""
    return any(_is_locked(path) for path in parent.glob(f"{_PREFIX}-{kind}-*"))


def _left_below(parent: Path, kind: str) -> list[Path]:
    """What may be without an owner; of the hidden, what its maker had time enough to lock."""
    hidden = parent.glob(f".{_PREFIX}-{kind}-*")
    return [*parent.glob(f"{_PREFIX}-{kind}-*"), *(path for path in hidden if _is_old(path))]


def _is_old(path: Path) -> bool:
    try:
        return time.time() - path.lstat().st_mtime > _HIDDEN_S
    except OSError:
        return False  # it has its name by now


def _reclaim_one(path: Path) -> bool:
    fd = _opened(path)
    if fd is None:
        return False
    try:
        if os.fstat(fd).st_uid != os.geteuid() or not _lock(fd, fcntl.LOCK_EX):
            return False
        _remove(path)
    finally:
        os.close(fd)
    _log.info("removed %s, left behind by a process that is gone", path)
    return True


def _is_locked(path: Path) -> bool:
    fd = _opened(path)
    if fd is None:
        return False
    try:
        return not _lock(fd, fcntl.LOCK_SH)  # two that look do not take each other for the owner
    finally:
        os.close(fd)


def _opened(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None  # another user's, or gone meanwhile


def _new_name(kind: str) -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")[:8]
    return f"{_PREFIX}-{kind}-{boot}-{os.getpid()}-{secrets.token_hex(4)}"


def _hidden(path: Path) -> Path:
    return path.with_name(f".{path.name}")


def _publish(fd: int, path: Path) -> int:
    """Lock what was just made and is hidden, then give it its name. Returns `fd`."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        _hidden(path).rename(path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _lock(fd: int, how: int) -> bool:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove(path: Path) -> None:
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except FileNotFoundError:
        pass
