"""Which tensor-parallel group a rank joins, and the group's life: open, join, abort, close.

Chooses between shared memory (CPU ranks of one host), gloo (CPU otherwise) and NCCL (CUDA), and says why. Knows
addresses and transports; knows nothing of models, plans or Ray.
"""

import logging
import time
from typing import Protocol

from torch import Tensor

from model_shards.group import SingleRank, TensorParallelGroup
from workers.config import Device
from workers.errors import GroupBroken
from workers.segment import Segment, shared_memory_refusal
from workers.shared_memory import SharedMemoryGroup
from workers.torch_groups import TorchRendezvous, join_torch_group

_log = logging.getLogger(__name__)

_ALONE = "alone"
_SHARED_MEMORY = "shm"


class WorkerGroup(TensorParallelGroup, Protocol):
    """A tensor-parallel group with an end: what `join_group` returns."""

    @property
    def transport(self) -> str: ...

    def abort(self) -> None:
        """Make this rank's collectives, and where the transport can those of its peers, fail now. Any thread."""
        ...

    def close(self) -> None:
        """Leave the group and free what it holds. Idempotent."""
        ...


class Rendezvous(Protocol):
    """What rank 0 holds open until every rank has joined; `address` goes to all of them."""

    @property
    def address(self) -> str: ...

    def close(self) -> None: ...


class _Alone(SingleRank):
    """A group of one, with the life cycle of a larger one."""

    transport = _ALONE
    address = _ALONE

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass


class TimedGroup:
    """A group that counts the seconds spent inside its collectives, and whose inner group can be exchanged.

    A model keeps the group it was built with, so a worker that survives a peer's death keeps this object and
    attaches the group of the next incarnation.
    """

    def __init__(self, group: WorkerGroup | None = None) -> None:
        self._group: WorkerGroup = _Alone() if group is None else group
        self._seconds = 0.0

    @property
    def rank(self) -> int:
        return self._group.rank

    @property
    def size(self) -> int:
        return self._group.size

    @property
    def transport(self) -> str:
        return self._group.transport

    def attach(self, group: WorkerGroup) -> None:
        """Use `group` from now on and close the one before."""
        self._group.close()
        self._group = group

    def take_seconds(self) -> float:
        """Seconds spent in collectives since the last call, which starts the count anew."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def all_reduce(self, tensor: Tensor) -> Tensor:
        started = time.perf_counter()
        result = self._group.all_reduce(tensor)
        self._seconds += time.perf_counter() - started
        return result

    def all_gather(self, tensor: Tensor) -> Tensor:
        started = time.perf_counter()
        result = self._group.all_gather(tensor)
        self._seconds += time.perf_counter() - started
        return result

    def broadcast(self, tensor: Tensor) -> Tensor:
        started = time.perf_counter()
        result = self._group.broadcast(tensor)
        self._seconds += time.perf_counter() - started
        return result

    def abort(self) -> None:
        self._group.abort()

    def close(self) -> None:
        self._group.close()


def open_group(size: int, device: Device, *, same_host: bool, host: str, deadline_s: float) -> Rendezvous:
    """On rank 0: choose the transport and open the meeting point. Close it when every rank has joined.

    `host` is this rank's address as its peers see it, for transports over the network.
    """
    if size == 1:
        return _Alone()
    if device == "cuda":
        _log.info("collectives over NCCL: %d CUDA ranks", size)
        return TorchRendezvous("nccl", host, size, deadline_s)
    refusal = shared_memory_refusal() if same_host else "the ranks are on several hosts"
    if refusal is None:
        try:
            segment = Segment.create(size)
        except OSError as error:
            refusal = f"no shared memory segment can be made: {error}"
        else:
            _log.info("collectives through shared memory: %d CPU ranks on one host", size)
            return segment
    _log.warning("collectives over gloo, which is some 20 times slower than shared memory: %s", refusal)
    return TorchRendezvous("gloo", host, size, deadline_s)


def join_group(
    address: str,
    rank: int,
    size: int,
    *,
    deadline_s: float,
    step_deadline_s: float,
    rendezvous: Rendezvous | None = None,
) -> WorkerGroup:
    """Meet the other ranks at `address` and return the group, once all are there.

    Rank 0 passes the `rendezvous` that it opened. `step_deadline_s` bounds each collective later on. Raises
    `GroupBroken` when a rank does not come by `deadline_s`.
    """
    kind, _, place = address.partition(":")
    if kind == _ALONE and size == 1:
        return _Alone()
    if kind == _SHARED_MEMORY:
        segment = rendezvous if isinstance(rendezvous, Segment) else Segment.open(place, size)
        return SharedMemoryGroup.join(segment, rank, deadline_s=deadline_s, step_deadline_s=step_deadline_s)
    if kind in ("gloo", "nccl"):
        return join_torch_group(
            kind, place, rank, size, deadline_s=deadline_s, step_deadline_s=step_deadline_s, rendezvous=rendezvous
        )
    raise GroupBroken(f"rank {rank}: {address!r} is not the address of a group of {size}")
