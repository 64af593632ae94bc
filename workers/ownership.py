"""Names on disk that tell who made them, and clearing away what dead makers left.

Every socket folder and shared-memory file is called `shardserve-<kind>-<boot id>-<pid>-<random>` and its maker
holds a lock on it. The kernel drops the lock with the process, however it ends and whatever PID namespace it lived
in, so "the lock is free" is what says that the owner is dead; boot id and pid are there for the people who look.
Knows files and locks; knows nothing of what is in them.
"""

import fcntl
import logging
import os
import secrets
import shutil
from pathlib import Path

_log = logging.getLogger(__name__)

_PREFIX = "shardserve"


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
        while True:
            path = parent / _new_name(kind)
            path.mkdir(mode=0o700)
            try:
                fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            if _keep(fd, path):
                return cls(path, fd)

    @classmethod
    def file(cls, parent: Path, kind: str) -> "Owned":
        """A new empty file below `parent` that only this user can open."""
        while True:
            path = parent / _new_name(kind)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            if _keep(fd, path):
                return cls(path, fd)

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
    removed = []
    for path in parent.glob(f"{_PREFIX}-{kind}-*"):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue  # another user's, or gone meanwhile
        try:
            if os.fstat(fd).st_uid == os.geteuid() and _lock(fd):
                _remove(path)
                removed.append(path)
                _log.info("removed %s, left behind by a process that is gone", path)
        finally:
            os.close(fd)
    return removed


def is_held(parent: Path, kind: str) -> bool:
    """Whether a process that lives owns something of this kind below `parent`."""
    for path in parent.glob(f"{_PREFIX}-{kind}-*"):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue  # another user's, or gone meanwhile
        try:
            if not _lock(fd):
                return True
        finally:
            os.close(fd)
    return False


def _new_name(kind: str) -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")[:8]
    return f"{_PREFIX}-{kind}-{boot}-{os.getpid()}-{secrets.token_hex(4)}"


def _keep(fd: int, path: Path) -> bool:
    """Lock what was just made. False when a process that reclaims was faster: then it is gone, make another."""
    if _lock(fd):
        try:
            if os.stat(path).st_ino == os.fstat(fd).st_ino:
                return True
        except FileNotFoundError:
            pass
    os.close(fd)
    return False


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
