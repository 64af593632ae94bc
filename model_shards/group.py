"""The tensor-parallel group as layers see it: three collectives and two numbers.

Knows tensors; knows nothing of transports, processes or deadlines (those belong to the implementations in
`workers.process_group` and `workers.shared_memory`).
"""

from typing import Protocol

from torch import Tensor


class TensorParallelGroup(Protocol):
    """The ranks that hold one model together. Every rank calls the same collectives in the same order.

    A collective that cannot complete by the implementation's deadline raises `workers.errors.GroupBroken`.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over all ranks, adding partial sums in rank order, so that every rank holds the same
        bits whatever the transport. Works in place where it can; use the return value."""
        ...

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Stack the ranks' equally shaped tensors: [*shape] -> [size, *shape]."""
        ...

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Rank 0's `tensor`, on every rank. All ranks pass the same shape and dtype."""
        ...


class SingleRank:
    """A group of one: every collective is the identity."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        return tensor.unsqueeze(0)

    def broadcast(self, tensor: Tensor) -> Tensor:
        return tensor
