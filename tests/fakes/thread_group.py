"""N ranks as threads of this process: tensor-parallel arithmetic without processes or sockets.

Adds partial sums in rank order, as every real group does, so results can be compared bit for bit.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from workers.errors import GroupBroken

T = TypeVar("T")
_DEADLINE_S = 280.0  # ranks that share a busy core come late
_SWITCH_INTERVAL_S = 0.0002  # ranks wait for each other hundreds of times a step, 5 ms each by default


class _Meeting:
    """What the ranks of one group share: a barrier, and a slot for each rank in two rows that take turns.

    Whoever writes to a row again has met all others once more since, so nobody still reads what was in it.
    """

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=_DEADLINE_S)
        self.rows: list[list[Tensor]] = [[torch.empty(0)] * size for _ in range(2)]


class ThreadGroup:
    """One rank's view of a group of threads. Make a whole group with `ThreadGroup.of(size)`."""

    def __init__(self, rank: int, size: int, meeting: _Meeting) -> None:
        self.rank = rank
        self.size = size
        self._meeting = meeting
        self._turn = 0

    @classmethod
    def of(cls, size: int) -> list["ThreadGroup"]:
        meeting = _Meeting(size)
        return [cls(rank, size, meeting) for rank in range(size)]

    def all_reduce(self, tensor: Tensor) -> Tensor:
        parts = self._exchange(tensor)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total

    def all_gather(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._exchange(tensor))

    def broadcast(self, tensor: Tensor) -> Tensor:
        return self._exchange(tensor)[0].clone()

    def abort(self) -> None:
        self._meeting.barrier.abort()

    def _exchange(self, tensor: Tensor) -> list[Tensor]:
        row = self._meeting.rows[self._turn]
        self._turn = 1 - self._turn
        row[self.rank] = tensor.detach().clone()
        try:
            self._meeting.barrier.wait()
        except threading.BrokenBarrierError:
            raise GroupBroken(f"rank {self.rank}: a peer left the group") from None
        return list(row)


def run_ranks(size: int, work: Callable[[ThreadGroup], T]) -> list[T]:
    """Run `work` once a rank, each in a thread, and return the results in rank order.

    A rank that raises breaks the group, so that its peers do not wait; its error is the one that is raised.
    """
    groups = ThreadGroup.of(size)

    def run(group: ThreadGroup) -> T:
        try:
            with torch.inference_mode():
                return work(group)
        except BaseException:
            group.abort()
            raise

    with _quick_switches(), ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, group) for group in groups]
        errors = [future.exception() for future in futures]
    causes = [error for error in errors if error is not None]
    if causes:
        raise next((error for error in causes if not isinstance(error, GroupBroken)), causes[0])
    return [future.result() for future in futures]


@contextmanager
def _quick_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
