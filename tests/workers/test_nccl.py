"""NCCL's group with a fake in NCCL's place: who is waited for, how it ends, and what is refused."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from workers import torch_groups
from workers.errors import GroupBroken
from workers.torch_groups import NcclGroup, TorchRendezvous, join_torch_group, meet

SHORT = timedelta(seconds=0.2)
LONG = timedelta(seconds=60)


class FakeNccl:
    """NCCL's process group with gloo's inside, so that torch itself judges how its methods are called."""

    class Options:
        _timeout = timedelta(0)

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self.options = options
        self.log: list[str] = []
        if size == 1:  # a larger one would wait for peers
            self._gloo = dist.ProcessGroupGloo(store, rank, size, LONG)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gloo, name)

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.log.append(f"connect {device}")

    def abort(self) -> None:
        self.log.append("abort")


@pytest.fixture
def with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNccl, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


@contextmanager
def store_of(size: int) -> Iterator[Any]:
    yield TorchRendezvous("nccl", "127.0.0.1", size, LONG.total_seconds()).store


def test_the_communicator_is_made_once_all_ranks_are_there(with_a_gpu: None) -> None:
    with store_of(2) as store:
        with pytest.raises(RuntimeError):
            NcclGroup(store, 0, 2, SHORT, 5.0)
        store.set("here/1", "")
        group = NcclGroup(store, 0, 2, LONG, 5.0)
        assert group._group.log == ["connect cuda:0"]
        assert group._group.options._timeout == timedelta(seconds=5)


def test_a_rank_that_does_not_come_breaks_the_group_by_the_deadline(with_a_gpu: None) -> None:
    rendezvous = TorchRendezvous("nccl", "127.0.0.1", 2, LONG.total_seconds())
    place = rendezvous.address.partition(":")[2]
    with pytest.raises(GroupBroken, match=r"no nccl group of 2 at .* within 0\.2 s"):
        join_torch_group("nccl", place, 0, 2, deadline_s=0.2, step_deadline_s=5.0, rendezvous=rendezvous)


def test_collectives_and_their_errors(with_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with store_of(1) as store:
        group = NcclGroup(store, 0, 1, LONG, 5.0)
    values = torch.arange(4.0)
    assert group.all_reduce(values) is values
    assert values.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert group.all_gather(values).tolist() == [[0.0, 1.0, 2.0, 3.0]]
    assert group.broadcast(values).tolist() == [0.0, 1.0, 2.0, 3.0]

    def fail(*_: Any) -> Any:
        raise RuntimeError("remote process exited")

    monkeypatch.setattr(FakeNccl, "allreduce", fail, raising=False)
    with pytest.raises(GroupBroken, match="rank 0: all_reduce over NCCL failed: remote process exited"):
        group.all_reduce(values)


def test_an_aborted_group_is_aborted_once_and_used_no_more(with_a_gpu: None) -> None:
    with store_of(1) as store:
        group = NcclGroup(store, 0, 1, LONG, 5.0)
    log = group._group.log
    group.abort()
    with pytest.raises(GroupBroken, match="all_reduce over NCCL after the group was aborted"):
        group.all_reduce(torch.ones(1))
    group.close()
    group.close()
    assert log == ["connect cuda:0", "abort"]


def test_a_process_without_a_gpu_is_told_so(with_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with store_of(1) as store, pytest.raises(ValueError, match="torch sees no GPU in this process"):
        NcclGroup(store, 0, 1, LONG, 5.0)


def test_a_build_without_nccl_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_groups.dist, "is_nccl_available", lambda: False)
    with store_of(1) as store, pytest.raises(ValueError, match="this build of torch has no NCCL"):
        NcclGroup(store, 0, 1, LONG, 5.0)


def test_ranks_meet_in_the_store() -> None:
    with store_of(2) as store:
        store.set("here/0", "")
        meet(store, 1, 2, LONG)
