"""What is packed comes out in its place, buffers take turns, and no wait is without an end."""

import numpy as np
import pytest
import torch

from workers.errors import GroupBroken, OutOfMemory
from workers.staging import IntArray, Readback, Upload, _wait_for

CPU = torch.device("cpu")


class Event:
    """Done when it has been asked often enough."""

    def __init__(self, asks: int) -> None:
        self.asks = asks

    def query(self) -> bool:
        self.asks -= 1
        return self.asks < 0


def test_arrays_come_out_in_order_with_their_shapes() -> None:
    upload = Upload(CPU, 20, deadline_s=1.0)
    given: list[IntArray] = [
        np.arange(6).reshape(2, 3),
        np.array([], dtype=np.int64),
        np.array([7, 8], dtype=np.int32),
    ]
    found = upload.send(given)
    assert [part.tolist() for part in found] == [[[0, 1, 2], [3, 4, 5]], [], [7, 8]]
    assert {part.dtype for part in found} == {torch.int32}
    assert len({part.untyped_storage().data_ptr() for part in found}) == 1, "one copy brings them all"


def test_the_host_buffers_take_turns() -> None:
    upload = Upload(CPU, 4, deadline_s=1.0)
    for number in range(3):
        upload.send([np.full(4, number)])
    assert sorted(buffer.values[0].item() for buffer in upload._buffers) == [1, 2]


def test_a_buffer_that_the_device_still_reads_is_waited_for() -> None:
    patient, hasty = (Upload(CPU, 4, deadline_s=deadline_s) for deadline_s in (60.0, 0.01))
    patient._buffers[0].sent = waited_for = Event(asks=3)
    patient.send([np.zeros(4, dtype=np.int64)])
    assert waited_for.asks < 0
    hasty._buffers[0].sent = Event(asks=10**9)
    with pytest.raises(GroupBroken, match=r"not finished a step within 0\.01 s"):
        hasty.send([np.zeros(4, dtype=np.int64)])


def test_more_than_the_buffer_holds_is_refused_with_the_numbers() -> None:
    with pytest.raises(OutOfMemory, match="a step has 5 integers, its buffer holds 4"):
        Upload(CPU, 4, deadline_s=1.0).send([np.zeros(5, dtype=np.int64)])


def test_what_is_in_the_hosts_memory_is_not_copied() -> None:
    tensor = torch.arange(3)
    assert Readback(CPU, deadline_s=1.0).fetch(tensor) is tensor


def test_a_wait_for_the_device_ends() -> None:
    _wait_for(Event(asks=5), deadline_s=60.0)
    with pytest.raises(GroupBroken, match="a peer is gone or stuck"):
        _wait_for(Event(asks=10**9), deadline_s=0.01)
