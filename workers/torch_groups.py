"""Groups over the network: gloo for CPU ranks on several hosts, NCCL for CUDA ranks.

Each group owns its process group and its store and leaves no default group of torch.distributed behind, so several
incarnations can follow each other in one process. Tests cover NCCL's group as far as a fake of NCCL reaches.

Knows torch.distributed; knows nothing of models, plans or Ray.
"""

import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed
from torch import Tensor

from workers.errors import GroupBroken

dist: Any = torch.distributed  # its annotations leave out most of what this module calls

_PIECE_BYTES = 4 * 2**20  # gloo sums need size times this much for the parts of all ranks

Kind = Literal["gloo", "nccl"]


class TorchRendezvous:
    """The key-value store through which ranks find each other. Rank 0 opens it; it lives as long as the group."""

    def __init__(self, kind: Kind, host: str, size: int, deadline_s: float) -> None:
        self.store = dist.TCPStore(
            host, 0, size, is_master=True, timeout=timedelta(seconds=deadline_s), wait_for_workers=False
        )
        self.address = f"{kind}:{host}:{self.store.port}"

    def close(self) -> None:
        """Nothing to do: the port closes with the last user of the store, which is the group."""


def join_torch_group(
    kind: str, place: str, rank: int, size: int, *, deadline_s: float, step_deadline_s: float, rendezvous: object
) -> "GlooGroup | NcclGroup":
    """Connect to the ranks that meet at `place`, "host:port". Raises `GroupBroken` when some do not come."""
    deadline = timedelta(seconds=deadline_s)
    try:
        if isinstance(rendezvous, TorchRendezvous):
            store = rendezvous.store
        else:
            host, _, port = place.rpartition(":")
            store = dist.TCPStore(host, int(port), size, is_master=False, timeout=deadline, wait_for_workers=False)
        if kind == "nccl":
            return NcclGroup(store, rank, size, deadline, step_deadline_s)
        return GlooGroup(store, rank, size, deadline, step_deadline_s, _own_address(place))
    except (RuntimeError, ValueError, OSError) as error:
        said = str(error).strip().partition("\n")[0]  # what follows is a stack of C++
        advice = "" if isinstance(error, ValueError) else "; between nodes its ranks need open TCP ports"
        raise GroupBroken(
            f"rank {rank}: no {kind} group of {size} at {place} within {deadline_s:g} s: {said}{advice}"
        ) from error


class GlooGroup:
    """Collectives over TCP. A sum gathers the parts and adds them in rank order: gloo's own order is another."""

    transport = "gloo"

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        join_deadline: timedelta,
        step_deadline_s: float,
        own_address: str | None,  # None: what gloo finds for itself
    ) -> None:
        self.rank = rank
        self.size = size
        self._deadline_s = step_deadline_s
        started = time.monotonic()
        meet(store, rank, size, join_deadline)  # gloo itself would not say who is missing
        options = dist.ProcessGroupGloo._Options()
        options._timeout = join_deadline - timedelta(seconds=time.monotonic() - started)
        device = dist.ProcessGroupGloo
        options._devices = [
            device.create_default_device() if own_address is None else device.create_device(hostname=own_address)
        ]
        self._group: Any = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, options)
        self._store = store

    def all_reduce(self, tensor: Tensor) -> Tensor:
        result = tensor.contiguous()
        for piece in torch.split(result.view(-1), _PIECE_BYTES // tensor.element_size()):
            parts = self._gather(piece, "all_reduce")
            piece.copy_(sum_in_order(parts))
        return result

    def all_gather(self, tensor: Tensor) -> Tensor:
        return self._gather(tensor.contiguous(), "all_gather")

    def broadcast(self, tensor: Tensor) -> Tensor:
        result = tensor.contiguous()
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._finish("broadcast", lambda: self._group.broadcast([result], options))
        return result

    def abort(self) -> None:
        group = self._group
        if group is not None:
            group.abort()

    def close(self) -> None:
        if self._group is not None:
            self._group.shutdown()
            self._group = self._store = None  # the store's port closes with its last user

    def _gather(self, tensor: Tensor, operation: str) -> Tensor:
        parts = tensor.new_empty((self.size, *tensor.shape))
        self._finish(operation, lambda: self._group.allgather([list(parts.unbind())], [tensor]))
        return parts

    def _finish(self, operation: str, start: Callable[[], Any]) -> None:
        try:
            start().wait(timedelta(seconds=self._deadline_s))
        except RuntimeError as error:
            raise GroupBroken(
                f"rank {self.rank}: {operation} over gloo did not complete within {self._deadline_s:g} s: {error}"
            ) from error


class NcclGroup:
    """Collectives between GPUs. NCCL's own order of summation is used: it is fixed for a given group and size.

    Its operations are queued on the current stream, and may be captured in a graph. A peer's death shows in three
    ways: whoever reads the step's result gives up at the step deadline (workers.staging); `abort`, which a stop
    calls, makes the kernels leave; and torch's watchdog ends this process when a collective outside a graph passes
    the step deadline. A broken group is not mended: all ranks start anew.
    """

    transport = "nccl"

    def __init__(self, store: Any, rank: int, size: int, join_deadline: timedelta, step_deadline_s: float) -> None:
        """Raises `ValueError` without NCCL or a GPU, `RuntimeError` when a rank does not come by the deadline."""
        self.rank = rank
        self.size = size
        self._aborted = False
        if not dist.is_nccl_available():
            raise ValueError("this build of torch has no NCCL")
        if not torch.cuda.is_available():
            raise ValueError("torch sees no GPU in this process")
        meet(store, rank, size, join_deadline)  # NCCL itself would wait for ever
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=step_deadline_s)
        self._group: Any = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, size, options)
        # Now, and not with the first collective, which may be inside a capture.
        self._group.eager_connect_single_device(torch.device("cuda", torch.cuda.current_device()))
        self._store = store

    def all_reduce(self, tensor: Tensor) -> Tensor:
        result = tensor.contiguous()
        self._start("all_reduce", lambda: self._group.allreduce([result]))
        return result

    def all_gather(self, tensor: Tensor) -> Tensor:
        result = tensor.new_empty((self.size, *tensor.shape))
        source = tensor.reshape(-1)
        self._start("all_gather", lambda: self._group._allgather_base(result.view(-1), source))
        return result

    def broadcast(self, tensor: Tensor) -> Tensor:
        result = tensor.contiguous()
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._start("broadcast", lambda: self._group.broadcast([result], options))
        return result

    def abort(self) -> None:
        group = self._group
        if group is not None and not self._aborted:
            self._aborted = True
            group.abort()

    def close(self) -> None:
        self.abort()
        self._group = self._store = None

    def _start(self, operation: str, start: Callable[[], Any]) -> None:
        if self._aborted:
            raise GroupBroken(f"rank {self.rank}: {operation} over NCCL after the group was aborted")
        try:
            start().wait()  # orders the current stream after the collective; does not block this thread
        except RuntimeError as error:
            raise GroupBroken(f"rank {self.rank}: {operation} over NCCL failed: {error}") from error


def meet(store: Any, rank: int, size: int, deadline: timedelta) -> None:
    """Return once all ranks have come. Raises `GroupBroken` at the deadline, naming those who have not."""
    store.set(f"here/{rank}", "")
    try:
        store.wait([f"here/{peer}" for peer in range(size)], deadline)
    except dist.DistStoreError as error:
        missing = [str(peer) for peer in range(size) if not store.check([f"here/{peer}"])]
        raise GroupBroken(f"rank {', '.join(missing)} did not come") from error


def _own_address(place: str) -> str | None:
    """This rank's address as the meeting point sees it, unless the user told gloo which interface to take.

    Gloo would look up the host's name instead, which in many containers leads nowhere, or to 127.0.0.1.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return None
    host, _, port = place.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))  # sends nothing, but chooses the route
        address: str = probe.getsockname()[0]
        return address


def sum_in_order(parts: Tensor) -> Tensor:
    """Sum over the first dimension, in its order; 16-bit floats in float32, to be rounded once by the caller."""
    half = parts.dtype in (torch.bfloat16, torch.float16)
    total = parts[0].to(torch.float32) if half else parts[0].clone()
    for part in parts[1:]:
        total.add_(part)
    return total
