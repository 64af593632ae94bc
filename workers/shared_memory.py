"""Collectives between CPU ranks of one host through one mapped file: microseconds where gloo takes hundreds.

Every exchange has a number. A rank writes its part into its own slot, then stores the number into its own flag,
then waits until its peers' flags have reached it and reads their slots. Slots come in pairs used in turn: a
rank that enters exchange n has read all of n - 1, so once all flags are at n - 1 the slots of n - 2 are free
to be written again, and no second barrier is needed.

That asks two things of the CPU: stores become visible in program order, and loads are not moved before earlier
loads. x86-64 promises both. Python has no fences to ask for them elsewhere, so other CPUs are refused.

Knows bytes, ranks and deadlines; knows nothing of models or plans.
"""

import logging
import mmap
import os
import platform
import select
import time
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from workers.errors import GroupBroken
from workers.ownership import Owned, reclaim

_log = logging.getLogger(__name__)

FOLDER = Path("/dev/shm")
SLOT_BYTES = 512 * 1024  # larger tensors go through in pieces

_KIND = "group"
_LINE = 16  # words: two cache lines, because the CPU prefetches lines in pairs
_ABORTED = 0  # word of the header line: 1 + the rank that gave up, 0 while all is well
# Words of a rank's line:
_FLAG = 0  # the last exchange it has entered
_PID = 1
_LEFT = 2  # 1 once it has closed the group
_WHAT = 3  # two words, used in turn: what it brought to an exchange, so that ranks out of step are found out

_SPIN_POLLS = 200  # about 10 us: longer than a peer on its own core needs
_CHECK_EVERY = 64  # yields between two looks at the clock
_PEER_CHECK_S = 0.01
_SLEEP_AFTER_S = 0.05  # a peer this late is not about to come: stop burning the core
_SLEEP_S = 0.0005
_MAX_VIEWS = 1024

_ALL_REDUCE, _ALL_GATHER, _BROADCAST = "all_reduce", "all_gather", "broadcast"
_OPERATIONS = {1: _ALL_REDUCE, 2: _ALL_GATHER, 3: _BROADCAST}
_CODES = {name: code for code, name in _OPERATIONS.items()}
_HALF = (torch.bfloat16, torch.float16)


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
    """

    def __init__(self, size: int, path: Path, fd: int, owned: Owned | None) -> None:
        self.size = size
        self.path = path
        self._owned = owned
        self._header_bytes = -(-(1 + size) * _LINE * 8 // mmap.PAGESIZE) * mmap.PAGESIZE
        length = self._header_bytes + 2 * size * SLOT_BYTES
        if owned is not None:
            os.posix_fallocate(fd, 0, length)  # a full /dev/shm is an error here, not a SIGBUS later
        self._map = mmap.mmap(fd, length)
        self.words = memoryview(self._map)[: self._header_bytes].cast("q")

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

    def slot(self, turn: int, rank: int, dtype: torch.dtype, count: int) -> Tensor:
        """The first `count` elements of a slot, as a flat tensor over the mapped bytes."""
        offset = self._header_bytes + (turn * self.size + rank) * SLOT_BYTES
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset)

    def close(self) -> None:
        """Take the file's name away, if this rank made it. The mapping goes with its last user. Idempotent."""
        if self._owned is not None:
            self._owned.close()


class SharedMemoryGroup:
    """One rank's end of the group. Used by one thread, except for `abort`."""

    transport = "shared memory"

    def __init__(self, segment: Segment, rank: int, deadline_s: float) -> None:
        self.rank = rank
        self.size = segment.size
        self._segment = segment
        self._words = segment.words
        self._deadline_s = deadline_s
        self._line = (1 + rank) * _LINE
        self._peers = [(1 + peer) * _LINE for peer in range(self.size) if peer != rank]
        self._number = 0
        self._views: dict[tuple[torch.dtype, torch.Size], tuple[list[Tensor], list[Tensor]]] = {}
        self._pidfds: dict[int, int] = {}
        self._deaths = select.poll()

    @classmethod
    def join(
        cls, segment: Segment, rank: int, *, deadline_s: float, step_deadline_s: float
    ) -> "SharedMemoryGroup":
        """Say that this rank is here and wait for the others. Raises `GroupBroken` naming who does not come."""
        group = cls(segment, rank, deadline_s)
        try:
            segment.words[group._line + _PID] = os.getpid()
            group._enter("joining", 0)
            group._await(group._peers, "joining")
            group._watch_peers()
        except GroupBroken:
            group.close()
            raise
        finally:
            segment.close()  # everyone has it mapped, or never will
        group._deadline_s = step_deadline_s
        return group

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum in rank order, in place where `tensor` is contiguous; 16-bit floats in float32, rounded once."""
        result = tensor if tensor.is_contiguous() else tensor.contiguous()
        for piece in self._pieces(result):
            _sum(self._exchange(piece, _ALL_REDUCE), piece)
        return result

    def all_gather(self, tensor: Tensor) -> Tensor:
        source = tensor if tensor.is_contiguous() else tensor.contiguous()
        if 0 < source.nbytes <= SLOT_BYTES:
            return torch.stack(self._exchange(source, _ALL_GATHER))
        result = source.new_empty((self.size, source.numel()))
        start = 0
        for piece in self._pieces(source):
            for rank, part in enumerate(self._exchange(piece, _ALL_GATHER)):
                result[rank, start : start + piece.numel()].copy_(part)
            start += piece.numel()
        return result.view(self.size, *source.shape)

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Rank 0 does not wait for its peers here, only before it writes the same slot again."""
        source = tensor if tensor.is_contiguous() else tensor.contiguous()
        if self.rank == 0:
            for piece in self._pieces(source):
                self._send(piece)
            return tensor
        result = torch.empty_like(source)
        for piece in self._pieces(result):
            piece.copy_(self._receive(piece))
        return result

    def abort(self) -> None:
        """Make every rank's present and later collectives fail at once. Any thread may call it."""
        if self._words[_ABORTED] == 0:
            self._words[_ABORTED] = 1 + self.rank

    def close(self) -> None:
        """Leave. Peers may finish what this rank has entered; one that waits for more fails. Idempotent."""
        self._words[self._line + _LEFT] = 1
        self._views.clear()
        for fd in self._pidfds.values():
            self._deaths.unregister(fd)
            os.close(fd)
        self._pidfds.clear()

    def _pieces(self, tensor: Tensor) -> list[Tensor]:
        """`tensor` itself if it fits a slot, else flat parts of it that do; nothing of nothing."""
        if tensor.nbytes <= SLOT_BYTES:
            return [tensor] if tensor.nbytes else []
        return list(torch.split(tensor.view(-1), SLOT_BYTES // tensor.element_size()))

    def _exchange(self, tensor: Tensor, operation: str) -> list[Tensor]:
        """Everyone's part of this exchange, in rank order; the memory is good until the next exchange but one."""
        turn, slots = self._begin(tensor, operation)
        slots[self.rank].copy_(tensor)
        self._enter(operation, tensor.nbytes)
        self._await(self._peers, operation)
        self._check_in_step(self._peers, turn)
        return slots

    def _send(self, tensor: Tensor) -> None:
        _, slots = self._begin(tensor, _BROADCAST)
        slots[0].copy_(tensor)
        self._enter(_BROADCAST, tensor.nbytes)

    def _receive(self, tensor: Tensor) -> Tensor:
        turn, slots = self._begin(tensor, _BROADCAST)
        root = self._peers[:1]
        self._enter(_BROADCAST, tensor.nbytes)
        self._await(root, _BROADCAST)
        self._check_in_step(root, turn)
        return slots[0]

    def _begin(self, tensor: Tensor, operation: str) -> tuple[int, list[Tensor]]:
        """Wait until the next exchange's slots are free; its turn, and its slots shaped as `tensor`."""
        self._await(self._peers, operation)
        turn = (self._number + 1) & 1
        key = (tensor.dtype, tensor.shape)
        views = self._views.get(key)
        if views is None:
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            views = (self._make_views(tensor, 0), self._make_views(tensor, 1))
            self._views[key] = views
        return turn, views[turn]

    def _make_views(self, tensor: Tensor, turn: int) -> list[Tensor]:
        return [
            self._segment.slot(turn, rank, tensor.dtype, tensor.numel()).view(tensor.shape)
            for rank in range(self.size)
        ]

    def _enter(self, operation: str, num_bytes: int) -> None:
        """Announce the next exchange. The flag is stored last: it publishes everything before it."""
        self._number += 1
        self._words[self._line + _WHAT + (self._number & 1)] = num_bytes << 8 | _CODES.get(operation, 0)
        self._words[self._line + _FLAG] = self._number

    def _await(self, lines: list[int], operation: str) -> None:
        """Wait until the ranks of `lines` have entered the exchange that this rank entered last."""
        words = self._words
        if words[_ABORTED]:
            self._fail_aborted(operation)
        for line in lines:
            if words[line] < self._number:
                self._await_slowly(line, operation)

    def _await_slowly(self, line: int, operation: str) -> None:
        words, number = self._words, self._number
        for _ in range(_SPIN_POLLS):
            if words[line] >= number:
                return
        started = time.monotonic()
        next_peer_check = started + _PEER_CHECK_S
        pause, turns = os.sched_yield, _CHECK_EVERY
        while True:
            for _ in range(turns):
                if words[line] >= number:
                    return
                if words[_ABORTED]:
                    self._fail_aborted(operation)
                pause()
            now = time.monotonic()
            if now - started > self._deadline_s:
                self._fail(operation, self._missing(), f"did not come within {self._deadline_s:g} s")
            if now >= next_peer_check:
                self._check_peers(operation)
                next_peer_check = now + _PEER_CHECK_S
            if now - started > _SLEEP_AFTER_S:
                pause, turns = _nap, 1

    def _check_in_step(self, lines: list[int], turn: int) -> None:
        mine = self._words[self._line + _WHAT + turn]
        for line in lines:
            theirs = self._words[line + _WHAT + turn]
            if theirs != mine:
                self.abort()
                raise GroupBroken(
                    f"ranks are out of step at exchange {self._number}: "
                    f"rank {self.rank} brings {_describe(mine)}, "
                    f"rank {line // _LINE - 1} brings {_describe(theirs)}"
                )

    def _watch_peers(self) -> None:
        """Open a descriptor on every peer's process, which the kernel marks when the process ends."""
        for line in self._peers:
            peer, pid = line // _LINE - 1, self._words[line + _PID]
            try:
                self._pidfds[peer] = os.pidfd_open(pid)
            except ProcessLookupError:
                self._fail("joining", [peer], "has died")
            except OSError as error:
                _log.warning(
                    "rank %d: the death of rank %d is noticed by deadline only: %s", self.rank, peer, error
                )
                continue
            self._deaths.register(self._pidfds[peer], select.POLLIN)

    def _check_peers(self, operation: str) -> None:
        """Raise if a peer that this rank may be waiting for has died or left."""
        ended = {fd for fd, _ in self._deaths.poll(0)}
        missing = self._missing()
        dead = [peer for peer in missing if self._pidfds.get(peer) in ended]
        if dead:
            self._fail(operation, dead, "died")
        left = [peer for peer in missing if self._words[(1 + peer) * _LINE + _LEFT]]
        if left:
            self._fail(operation, left, "left the group")

    def _missing(self) -> list[int]:
        return [line // _LINE - 1 for line in self._peers if self._words[line] < self._number]

    def _fail(self, operation: str, peers: list[int], what: str) -> NoReturn:
        names = ", ".join(map(str, peers))
        raise GroupBroken(f"rank {self.rank}: {operation} cannot complete, rank {names} {what}")

    def _fail_aborted(self, operation: str) -> NoReturn:
        self._fail(operation, [self._words[_ABORTED] - 1], "gave the group up")


def _sum(parts: list[Tensor], result: Tensor) -> None:
    """Add `parts` in their order into `result`. Two 16-bit floats need no wider sum: adding them rounds once."""
    if len(parts) == 2 or result.dtype not in _HALF:
        torch.add(parts[0], parts[1], out=result)
        for part in parts[2:]:
            result.add_(part)
        return
    total = parts[0].to(torch.float32)
    for part in parts[1:]:
        total.add_(part)
    result.copy_(total)


def _nap() -> None:
    time.sleep(_SLEEP_S)


def _describe(what: int) -> str:
    return f"{what >> 8} bytes to {_OPERATIONS.get(what & 0xFF, 'an unknown operation')}"
