"""Collectives through shared memory: the same bits everywhere, dead and late peers named, nothing left behind."""

import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.workers.processes import spawn_ranks
from workers import segment as segment_module
from workers.errors import GroupBroken
from workers.segment import SLOT_BYTES, Segment, shared_memory_refusal
from workers.shared_memory import SharedMemoryGroup

LONG_S = 60.0
SHORT_S = 0.3

Work = Callable[[SharedMemoryGroup], object]


def in_threads(size: int, work: Work, step_deadline_s: float = LONG_S) -> list[object]:
    """Each rank's result or error. Threads map the file one by one, as processes do."""
    segment = Segment.create(size)
    path = str(segment.path)

    def rank_main(rank: int) -> object:
        mine = segment if rank == 0 else Segment.open(path, size)
        group = SharedMemoryGroup.join(mine, rank, deadline_s=LONG_S, step_deadline_s=step_deadline_s)
        try:
            return work(group)
        except GroupBroken as error:
            return error
        finally:
            group.close()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank_main, range(size)))


def part(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(shape, generator=generator) * 10.0**rank  # sums in another order have other bits
    return values.to(dtype)


def expected_sum(parts: list[Tensor]) -> Tensor:
    if parts[0].dtype not in (torch.bfloat16, torch.float16):
        total = parts[0].clone()
        for other in parts[1:]:
            total += other
        return total
    wide = parts[0].float()
    for other in parts[1:]:
        wide += other.float()
    return wide.to(parts[0].dtype)


SHAPES = [(1,), (3, 5), (0, 4), (), (SLOT_BYTES // 4,), (SLOT_BYTES // 4 + 1,), (7, SLOT_BYTES // 8 + 3)]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_sums_are_in_rank_order_and_the_same_bits_everywhere(size: int, dtype: torch.dtype) -> None:
    def work(group: SharedMemoryGroup) -> list[Tensor]:
        return [group.all_reduce(part(group.rank, shape, dtype)) for shape in SHAPES]

    totals = in_threads(size, work)
    for index, shape in enumerate(SHAPES):
        expected = expected_sum([part(rank, shape, dtype) for rank in range(size)])
        for of_rank in totals:
            assert isinstance(of_rank, list)
            assert torch.equal(of_rank[index], expected)
            assert of_rank[index].shape == expected.shape


def test_gather_and_broadcast_bring_whole_tensors_of_any_size() -> None:
    def work(group: SharedMemoryGroup) -> list[tuple[Tensor, Tensor]]:
        return [
            (
                group.all_gather(part(group.rank, shape, torch.float32)),
                group.broadcast(part(group.rank, shape, torch.float32)),
            )
            for shape in SHAPES
        ]

    for of_rank in in_threads(3, work):
        assert isinstance(of_rank, list)
        for shape, (gathered, broadcast) in zip(SHAPES, of_rank, strict=True):
            assert torch.equal(gathered, torch.stack([part(rank, shape, torch.float32) for rank in range(3)]))
            assert torch.equal(broadcast, part(0, shape, torch.float32))


def test_all_reduce_works_in_place_unless_the_tensor_has_gaps() -> None:
    def work(group: SharedMemoryGroup) -> tuple[bool, Tensor]:
        plain = torch.ones(4)
        in_place = group.all_reduce(plain).data_ptr() == plain.data_ptr()
        return in_place, group.all_reduce(torch.arange(12.0).view(3, 4)[:, 1])

    for outcome in in_threads(2, work):
        assert isinstance(outcome, tuple)
        assert outcome[0]
        assert outcome[1].tolist() == [2.0, 10.0, 18.0]


def test_results_do_not_change_when_the_memory_is_used_again() -> None:
    def work(group: SharedMemoryGroup) -> list[Tensor]:
        kept = [group.all_gather(torch.full((4,), float(turn))) for turn in range(4)]
        return kept + [group.broadcast(torch.full((4,), float(turn))) for turn in range(4)]

    for kept in in_threads(2, work):
        assert isinstance(kept, list)
        assert [int(tensor.max()) for tensor in kept] == [0, 1, 2, 3] * 2
        assert [int(tensor.min()) for tensor in kept] == [0, 1, 2, 3] * 2


@pytest.mark.parametrize("other", ["size", "operation"])
def test_ranks_out_of_step_are_found_out(other: str) -> None:
    def work(group: SharedMemoryGroup) -> Tensor:
        if group.rank == 0:
            return group.all_reduce(torch.ones(4))
        return group.all_reduce(torch.ones(5)) if other == "size" else group.all_gather(torch.ones(4))

    outcomes = in_threads(2, work)
    broken = [str(outcome) for outcome in outcomes if isinstance(outcome, GroupBroken)]
    assert any("out of step" in message and "16 bytes to all_reduce" in message for message in broken)


def test_a_rank_that_does_not_come_is_named_with_the_operation() -> None:
    over = threading.Semaphore(0)

    def work(group: SharedMemoryGroup) -> object:
        group.all_reduce(torch.ones(1))
        if group.rank == 1:
            return over.acquire(timeout=LONG_S) and over.acquire(timeout=LONG_S)
        try:
            return group.all_gather(torch.ones(1))
        finally:
            over.release()

    outcomes = in_threads(3, work, step_deadline_s=2.0)  # the others come well within it
    for rank in (0, 2):
        assert "all_gather cannot complete, rank 1 did not come within 2 s" in str(outcomes[rank])
    assert outcomes[1]


def test_abort_ends_waits_and_later_calls_on_every_rank() -> None:
    def work(group: SharedMemoryGroup) -> Tensor:
        if group.rank == 1:
            time.sleep(SHORT_S)
            group.abort()
        return group.all_reduce(torch.ones(1))

    outcomes = in_threads(2, work)
    assert ["rank 1 gave the group up" in str(outcome) for outcome in outcomes] == [True, True]


def test_a_rank_that_leaves_is_named_but_what_it_finished_stands() -> None:
    def work(group: SharedMemoryGroup) -> object:
        if group.rank == 0:
            return group.broadcast(torch.ones(1))
        time.sleep(SHORT_S)  # rank 0 has closed the group by now
        assert group.broadcast(torch.zeros(1)).item() == 1
        return group.all_reduce(torch.ones(1))

    assert "all_reduce cannot complete, rank 0 left the group" in str(in_threads(2, work)[1])


def test_a_rank_missing_at_the_start_is_named_and_nothing_is_left() -> None:
    segment = Segment.create(3)
    with pytest.raises(GroupBroken, match="joining cannot complete, rank 1, 2 did not come"):
        SharedMemoryGroup.join(segment, 0, deadline_s=SHORT_S, step_deadline_s=LONG_S)
    assert not segment.path.exists()


def test_the_file_is_private_and_has_no_name_once_all_have_mapped_it() -> None:
    def work(group: SharedMemoryGroup) -> list[str]:
        group.all_reduce(torch.ones(1))
        return [path.name for path in segment_module.FOLDER.glob(f"shardserve-group-*-{os.getpid()}-*")]

    assert in_threads(2, work) == [[], []]


def test_a_group_that_is_closed_leaves_no_descriptor_and_no_mapping() -> None:
    def held() -> tuple[int, int]:
        gc.collect()
        maps = Path("/proc/self/maps").read_text()
        return len(os.listdir("/proc/self/fd")), maps.count("shardserve-group")

    in_threads(2, lambda group: group.all_reduce(torch.ones(1)))
    before = held()
    in_threads(2, lambda group: group.all_reduce(torch.ones(1)))
    assert held() == (before[0], 0)


@pytest.mark.parametrize("found", ["nothing", "too small"])
def test_a_file_that_is_no_segment_of_the_group_is_refused(tmp_path: Path, found: str) -> None:
    path = tmp_path / "segment"
    if found == "too small":
        path.write_bytes(b"x")
    with pytest.raises(GroupBroken, match="cannot be mapped"):
        Segment.open(str(path), 2)


def test_weakly_ordered_cpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert "aarch64" in str(shared_memory_refusal())


def test_no_room_is_an_error_at_the_start_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(segment_module, "FOLDER", tmp_path)
    monkeypatch.setattr("os.posix_fallocate", refuse)
    with pytest.raises(OSError, match="No space left"):
        Segment.create(2)
    assert list(tmp_path.iterdir()) == []


# Real processes from here on.


def add_many(rank: int, connection: Connection, size: int) -> None:
    """Sizes and operations mixed, thousands of times, each checked against what all ranks must see."""
    torch.set_num_threads(1)
    with joined(rank, connection, size) as group:
        wrong = 0
        for turn in range(2000):
            count = (1, 17, 1024, 50_000)[turn % 4]
            total = group.all_reduce(torch.full((count,), float(turn + rank)))
            wrong += not bool((total == size * turn + sum(range(size))).all())
            if turn % 3 == 0:
                wrong += group.broadcast(torch.tensor([turn * (1 - rank)])).item() != turn
            if turn % 5 == 0:
                wrong += group.all_gather(torch.tensor([turn + rank])).flatten().tolist() != [
                    turn + peer for peer in range(size)
                ]
        connection.send(wrong)


def wait_for_ever(rank: int, connection: Connection, size: int) -> None:
    """Ranks other than 1 wait in a collective for rank 1, and say how that ended and after how long."""
    with joined(rank, connection, size) as group:
        group.all_reduce(torch.ones(1))
        connection.send("joined")
        if rank == 1:
            connection.recv()
        started = time.monotonic()
        try:
            group.all_reduce(torch.ones(1))
        except GroupBroken as error:
            connection.send((str(error), time.monotonic() - started))


@contextlib.contextmanager
def joined(rank: int, connection: Connection, size: int):  # type: ignore[no-untyped-def]
    if rank == 0:
        segment = Segment.create(size)
        connection.send(str(segment.path))
    else:
        segment = Segment.open(connection.recv(), size)
    group = SharedMemoryGroup.join(segment, rank, deadline_s=LONG_S, step_deadline_s=LONG_S)
    try:
        yield group
    finally:
        group.close()


def make_and_wait(_: int, connection: Connection) -> None:
    connection.send(str(Segment.create(2).path))
    connection.recv()


def test_two_processes_always_see_the_same_sums() -> None:
    with spawn_ranks(add_many, 2, 2) as ranks:
        ranks[1].send(ranks[0].receive())
        assert [rank.receive() for rank in ranks] == [0, 0]


def test_a_peers_death_ends_a_wait_long_before_the_deadline_and_leaves_nothing() -> None:
    with spawn_ranks(wait_for_ever, 3, 3) as ranks:
        path = ranks[0].receive()
        for rank in ranks[1:]:
            rank.send(path)
        assert [rank.receive() for rank in ranks] == ["joined"] * 3
        assert not Path(path).exists()
        os.kill(ranks[1].pid, signal.SIGKILL)
        for rank in (ranks[0], ranks[2]):
            message, seconds = rank.receive()
            assert "all_reduce cannot complete, rank 1 died" in message
            assert seconds < LONG_S / 2


def test_a_new_group_clears_away_what_a_killed_rank_0_left() -> None:
    with spawn_ranks(make_and_wait, 1) as [other]:
        left = Path(other.receive())
        other.kill()
        assert left.exists()
        Segment.create(2).close()
        assert not left.exists()
