"""Collectives between CPU ranks of one host through one mapped file: microseconds where gloo takes hundreds.

Every exchange has a number. A rank writes its part into its own slot, then stores the number into its own flag,
then waits until its peers' flags have reached it and reads their slots. Slots come in pairs used in turn: a
rank that enters exchange n has read all of n - 1, so once all flags are at n - 1 the slots of n - 2 are free
to be written again, and no second barrier is needed.

That asks two things of the CPU: stores become visible in program order, and loads are not moved before earlier
loads. x86-64 promises both. Python has no fences to ask for them elsewhere, so other CPUs are refused.

That a peer sleeps is read after the own flag is stored, an order that x86-64 does not promise; so a wake-up may be
lost, once in a long while, and no sleep is long.

Knows bytes, ranks and deadlines; knows nothing of models or plans.
"""

import logging
import os
import select
import time
from typing import NoReturn

import torch
from torch import Tensor

from workers import futex
from workers.errors import GroupBroken
from workers.segment import LINE, SLOT_BYTES, Segment

_log = logging.getLogger(__name__)

_ABORTED = 0  # word of the group's line: 1 + the rank that gave up, 0 while all is well
# Words of a rank's line:
_FLAG = 0  # the last exchange it has entered
_PID = 1
_LEFT = 2  # 1 once it has closed the group
_ASLEEP = 3  # 1 while it sleeps on a peer's flag
_WHAT = 4  # two words, used in turn: what it brought to an exchange, so that ranks out of step are found out

_SPIN_POLLS = 200  # about 10 us: longer than a peer on its own core needs
_LONG_YIELD_S = 0.002  # a yield that took so long gave the core to someone busy, not to a driver's short turn
_CROWDED_S = 0.1  # for so long after it, sleep instead of yielding
_PATIENCE_S = 0.002  # a peer so late has something long to do: do not burn the core
_SLEEP_S = 0.002  # the longest sleep; also what a wake-up that got lost costs
_PEER_CHECK_S = 0.01
_MAX_VIEWS = 1024

_ALL_REDUCE, _ALL_GATHER, _BROADCAST = "all_reduce", "all_gather", "broadcast"
_OPERATIONS = {1: _ALL_REDUCE, 2: _ALL_GATHER, 3: _BROADCAST}
_CODES = {name: code for code, name in _OPERATIONS.items()}
_HALF = (torch.bfloat16, torch.float16)


class SharedMemoryGroup:
    """One rank's end of the group. Used by one thread, except for `abort`."""

    transport = "shared memory"

    def __init__(self, segment: Segment, rank: int, deadline_s: float) -> None:
        self.rank = rank
        self.size = segment.size
        self._segment = segment
        self._words = segment.words
        self._deadline_s = deadline_s
        self._line = (1 + rank) * LINE
        self._peers = [(1 + peer) * LINE for peer in range(self.size) if peer != rank]
        self._number = 0
        self._crowded_until = 0.0
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
        """Sum in rank order, in place unless `tensor` has gaps; 16-bit floats in float32, rounded once."""
        result = tensor.contiguous()
        for piece in self._pieces(result):
            _sum(self._exchange(piece, _ALL_REDUCE), piece)
        return result

    def all_gather(self, tensor: Tensor) -> Tensor:
        source = tensor.contiguous()
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
        source = tensor.contiguous()
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
        for peer in self._peers:
            if self._words[peer + _ASLEEP]:
                futex.wake(self._segment.address_of(self._line))
                break

    def _await(self, lines: list[int], operation: str) -> None:
        """Wait until the ranks of `lines` have entered the exchange that this rank entered last."""
        words = self._words
        if words[_ABORTED]:
            self._fail_aborted(operation)
        for line in lines:
            if words[line] < self._number:
                self._await_slowly(line, operation)

    def _await_slowly(self, line: int, operation: str) -> None:
        """Spin; then yield, as long as nobody busy wants the core; then sleep.

        A rank that yields to a busy process gets its core back a time slice later, one that sleeps as soon as
        it is woken: with busy processes on the ranks' cores, sleeping made steps two to four times faster. The
        short turns of a driver and a proxy are no reason to sleep: in a virtual machine a wake-up takes 0.1 ms and
        more, and sleeping for each of 61 exchanges made a step of SmolLM2 take 90 ms instead of 70.
        """
        words, number = self._words, self._number
        for _ in range(_SPIN_POLLS):
            if words[line] >= number:
                return
        now = started = time.monotonic()
        next_peer_check = started + _PEER_CHECK_S
        while words[line] < number:
            before = now
            if before < self._crowded_until or before - started > _PATIENCE_S:
                self._sleep(line)
                now = time.monotonic()
            else:
                os.sched_yield()
                now = time.monotonic()
                if now - before > _LONG_YIELD_S:
                    self._crowded_until = now + _CROWDED_S
            if words[_ABORTED]:
                self._fail_aborted(operation)
            if now >= next_peer_check:
                self._check_peers(operation)
                next_peer_check = now + _PEER_CHECK_S
            if now - started > self._deadline_s:
                self._fail(operation, self._missing(), f"did not come within {self._deadline_s:g} s")

    def _sleep(self, line: int) -> None:
        """Until the flag of `line` moves, or a little while."""
        seen = self._words[line]
        self._words[self._line + _ASLEEP] = 1
        if seen < self._number:
            futex.wait(self._segment.address_of(line), seen, _SLEEP_S)
        self._words[self._line + _ASLEEP] = 0

    def _check_in_step(self, lines: list[int], turn: int) -> None:
        mine = self._words[self._line + _WHAT + turn]
        for line in lines:
            theirs = self._words[line + _WHAT + turn]
            if theirs != mine:
                self.abort()
                raise GroupBroken(
                    f"ranks are out of step at exchange {self._number}: "
                    f"rank {self.rank} brings {_describe(mine)}, "
                    f"rank {line // LINE - 1} brings {_describe(theirs)}"
                )

    def _watch_peers(self) -> None:
        """Open a descriptor on every peer's process, which the kernel marks when the process ends."""
        for line in self._peers:
            peer, pid = line // LINE - 1, self._words[line + _PID]
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
        left = [peer for peer in missing if self._words[(1 + peer) * LINE + _LEFT]]
        if left:
            self._fail(operation, left, "left the group")

    def _missing(self) -> list[int]:
        return [line // LINE - 1 for line in self._peers if self._words[line] < self._number]

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


def _describe(what: int) -> str:
    return f"{what >> 8} bytes to {_OPERATIONS.get(what & 0xFF, 'an unknown operation')}"
