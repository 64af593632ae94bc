"""The integers of a step on their way to an accelerator and back: one copy each, through pinned memory.

Knows arrays and a device; knows nothing of what the numbers mean.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from workers.errors import GroupBroken, OutOfMemory

cuda: Any = torch.cuda  # its events are not annotated

IntArray = npt.NDArray[np.int32] | npt.NDArray[np.int64]

_BUFFERS = 2  # on the host: one is filled while the device may still read the other


@dataclass(slots=True)
class _HostBuffer:
    values: Tensor  # [capacity] int32
    sent: Any = None  # when the device has read it


class Upload:
    """Carries the integers of one step to the device, packed into one buffer. Used by one thread."""

    def __init__(self, device: torch.device, capacity: int, deadline_s: float) -> None:
        self._on_cuda = device.type == "cuda"
        self._deadline_s = deadline_s
        self._buffers = [
            _HostBuffer(torch.empty(capacity, dtype=torch.int32, pin_memory=self._on_cuda))
            for _ in range(_BUFFERS)
        ]
        self._device_buffer = torch.empty(capacity, dtype=torch.int32, device=device)
        self._turn = 0

    def send(self, arrays: Sequence[IntArray]) -> list[Tensor]:
        """The arrays as int32 tensors on the device, in order, without waiting for the copy.

        They share one buffer and are valid until the next call. Raises `OutOfMemory` for more than the capacity,
        `GroupBroken` when the device has not come to the step before the last by the deadline.
        """
        buffer = self._buffers[self._turn]
        self._turn = (self._turn + 1) % _BUFFERS
        if buffer.sent is not None:
            _wait_for(buffer.sent, self._deadline_s)
        sizes = [array.size for array in arrays]
        total = sum(sizes)
        if total > len(buffer.values):
            raise OutOfMemory(f"a step has {total} integers, its buffer holds {len(buffer.values)}")
        packed = buffer.values.numpy()
        for array, end, size in zip(arrays, accumulate(sizes), sizes, strict=True):
            packed[end - size : end] = array.reshape(-1)
        target = self._device_buffer[:total]
        target.copy_(buffer.values[:total], non_blocking=True)
        if self._on_cuda:
            buffer.sent = cuda.Event()
            buffer.sent.record()
        parts = torch.split(target, sizes)
        return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


class Readback:
    """Carries results from the device to the host: the one place where a step waits for it. Used by one thread."""

    def __init__(self, device: torch.device, deadline_s: float) -> None:
        self.device = device
        self._deadline_s = deadline_s
        self._pinned = torch.empty(0, dtype=torch.uint8)

    def fetch(self, tensor: Tensor) -> Tensor:
        """The tensor in the host's memory, once everything queued before it is done. Valid until the next call.

        Raises `GroupBroken` at the deadline: a kernel that does not end is a collective whose peer is gone.
        """
        if tensor.device.type != "cuda":
            return tensor
        size = tensor.nbytes
        if size > len(self._pinned):
            self._pinned = torch.empty(1 << math.ceil(math.log2(size)), dtype=torch.uint8, pin_memory=True)
        host = self._pinned[:size].view(tensor.dtype).view(tensor.shape)
        host.copy_(tensor, non_blocking=True)
        copied = cuda.Event()
        copied.record()
        _wait_for(copied, self._deadline_s)
        return host


def _wait_for(event: Any, deadline_s: float) -> None:
    """CUDA's own waits have no end."""
    deadline = time.monotonic() + deadline_s
    while not event.query():
        if time.monotonic() > deadline:
            raise GroupBroken(
                f"the device has not finished a step within {deadline_s:g} s: a peer is gone or stuck"
            )
        time.sleep(0)  # lets other threads run, a stop among them
