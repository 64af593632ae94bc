"""The mapped file through which CPU ranks of one host meet: a line of words for each rank, then data slots.

A word is 8 bytes, aligned, and read or written in one piece, by one rank only; each rank has its own cache lines.
Knows layout, mapping and the file's life; knows nothing of what the words and the slots mean.
"""

import mmap
import os
import platform
from pathlib import Path

import torch
from torch import Tensor

from workers.errors import GroupBroken
from workers.ownership import Owned, reclaim

FOLDER = Path("/dev/shm")
SLOT_BYTES = 1024 * 1024
LINE = 16  # words: two cache lines, because the CPU prefetches lines in pairs

_KIND = "group"


def shared_memory_refusal() -> str | None:
    """Why ranks of this host cannot meet in shared memory, or None."""
    machine = platform.machine()
    if machine not in ("x86_64", "AMD64"):
        return f"shared-memory collectives rely on the store order of x86-64, and this CPU is {machine}"
    if not FOLDER.is_dir():
        return f"there is no {FOLDER}"
    return None


class Segment:
    """The mapped file of one group. Rank 0 creates it, its peers open it by address.

    Layout: a line of words for the group, one for each rank, then two slots for each rank, page-aligned.
    `words` is all lines as one array.
    """

    def __init__(self, size: int, path: Path, fd: int, owned: Owned | None) -> None:
        self.size = size
        self.path = path
        self._owned = owned
        self._header_bytes = -(-(1 + size) * LINE * 8 // mmap.PAGESIZE) * mmap.PAGESIZE
        length = self._header_bytes + 2 * size * SLOT_BYTES
        if owned is not None:
            os.posix_fallocate(fd, 0, length)  # a full /dev/shm is an error here, not a SIGBUS later
        self._map = mmap.mmap(fd, length)
        self.words = memoryview(self._map)[: self._header_bytes].cast("q")
        self._first_word = torch.frombuffer(self._map, dtype=torch.int64, count=1)

    @classmethod
    def create(cls, size: int) -> "Segment":
        """Make the file, after clearing away those of dead groups. Raises OSError where there is no room."""
        reclaim(FOLDER, _KIND)
        owned = Owned.file(FOLDER, _KIND)
        try:
            return cls(size, owned.path, owned.fd, owned)
        except OSError:
            owned.close()
            raise

    @classmethod
    def open(cls, path: str, size: int) -> "Segment":
        """Map the file that rank 0 made. Raises `GroupBroken` when there is none, or it is too small."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                return cls(size, Path(path), fd, None)
            finally:
                os.close(fd)
        except (OSError, ValueError) as error:
            raise GroupBroken(f"the shared memory of the group, {path}, cannot be mapped: {error}") from error

    @property
    def address(self) -> str:
        return f"shm:{self.path}"

    def address_of(self, word: int) -> int:
        """Where a word is in this process's memory."""
        return self._first_word.data_ptr() + 8 * word

    def slot(self, turn: int, rank: int, dtype: torch.dtype, count: int) -> Tensor:
        """The first `count` elements of a slot, as a flat tensor over the mapped bytes."""
        offset = self._header_bytes + (turn * self.size + rank) * SLOT_BYTES
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset)

    def close(self) -> None:
        """Take the file's name away, if this rank made it. The mapping goes with its last user. Idempotent."""
        if self._owned is not None:
            self._owned.close()
