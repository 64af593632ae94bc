"""Choosing a transport and forming the group: the same sums over each, and no wait without an end."""

import logging
import re
import socket
import time
from multiprocessing.connection import Connection

import pytest
import torch
from torch import Tensor

from tests.workers.processes import Rank, spawn_ranks
from workers import process_group
from workers.errors import GroupBroken
from workers.process_group import TimedGroup, WorkerGroup, join_group, open_group
from workers.torch_groups import dist, sum_in_order

LONG_S = 60.0
SHORT_S = 1.0


def meet(rank: int, connection: Connection, size: int, same_host: bool, step_deadline_s: float) -> WorkerGroup:
    """Join a group whose address goes through the test: rank 0 sends it, the others receive it."""
    rendezvous = None
    if rank == 0:
        rendezvous = open_group(size, "cpu", same_host=same_host, host="127.0.0.1", deadline_s=LONG_S)
        connection.send(rendezvous.address)
        address = rendezvous.address
    else:
        address = connection.recv()
    group = join_group(
        address, rank, size, deadline_s=LONG_S, step_deadline_s=step_deadline_s, rendezvous=rendezvous
    )
    if rendezvous is not None:
        rendezvous.close()
    return group


def introduce(ranks: list[Rank]) -> str:
    address: str = ranks[0].receive()
    for rank in ranks[1:]:
        rank.send(address)
    return address


def part(rank: int, dtype: torch.dtype = torch.float32, count: int = 1000) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(count, generator=generator) * 10.0**rank).to(dtype)


def use_twice(rank: int, connection: Connection, size: int, same_host: bool) -> None:
    """Two incarnations one after the other in one process."""
    torch.set_num_threads(1)
    for _ in range(2):
        group = meet(rank, connection, size, same_host, LONG_S)
        assert (group.rank, group.size) == (rank, size)
        sums = [group.all_reduce(part(rank, dtype)) for dtype in (torch.float32, torch.bfloat16)]
        large = group.all_reduce(torch.full((1_100_000,), float(rank + 1)))  # more than one piece
        gathered = group.all_gather(part(rank).view(10, 100))
        broadcast = group.broadcast(part(rank))
        group.close()
        group.close()
        wrong = (
            [
                dtype
                for total, dtype in zip(sums, (torch.float32, torch.bfloat16), strict=True)
                if not torch.equal(
                    total, sum_in_order(torch.stack([part(peer, dtype) for peer in range(size)])).to(dtype)
                )
            ],
            bool((large != sum(range(1, size + 1))).any()),
            not torch.equal(gathered, torch.stack([part(peer).view(10, 100) for peer in range(size)])),
            not torch.equal(broadcast, part(0)),
        )
        connection.send((group.transport, wrong))
    connection.send(torch.distributed.is_initialized())


@pytest.mark.parametrize(("same_host", "transport"), [(True, "shared memory"), (False, "gloo")])
def test_transports_give_the_same_bits_and_follow_each_other_in_one_process(
    same_host: bool, transport: str
) -> None:
    with spawn_ranks(use_twice, 3, 3, same_host) as ranks:
        addresses = set()
        for _ in range(2):
            addresses.add(introduce(ranks))
            assert [rank.receive() for rank in ranks] == [(transport, ([], False, False, False))] * 3
        assert len(addresses) == 2
        assert [rank.receive() for rank in ranks] == [False] * 3  # no default group was left behind


def reduce_and_tell(rank: int, connection: Connection, same_host: bool, step_deadline_s: float) -> None:
    group = meet(rank, connection, 2, same_host, step_deadline_s)
    group.all_reduce(torch.ones(1))
    connection.send("joined")
    if rank == 1:
        connection.recv()
    started = time.monotonic()
    try:
        group.all_reduce(torch.ones(1))
    except GroupBroken as error:
        connection.send((str(error), time.monotonic() - started))


def test_gloo_notices_a_dead_peer() -> None:
    with spawn_ranks(reduce_and_tell, 2, False, LONG_S) as ranks:
        introduce(ranks)
        assert [rank.receive() for rank in ranks] == ["joined"] * 2
        ranks[1].kill()
        message, seconds = ranks[0].receive()
        assert "all_reduce over gloo" in message
        assert seconds < LONG_S / 2


def test_gloo_notices_a_peer_that_does_not_come_by_the_deadline() -> None:
    deadline_s = 3.0  # long enough for the first step, in which both come
    with spawn_ranks(reduce_and_tell, 2, False, deadline_s) as ranks:
        introduce(ranks)
        assert [rank.receive() for rank in ranks] == ["joined"] * 2
        message, seconds = ranks[0].receive()
        assert f"all_reduce over gloo did not complete within {deadline_s:g} s" in message
        assert seconds < LONG_S / 2


def join_alone(rank: int, connection: Connection, address: str) -> None:
    try:
        join_group(address, rank, 2, deadline_s=SHORT_S, step_deadline_s=SHORT_S)
    except GroupBroken as error:
        connection.send(str(error))


def test_a_meeting_point_behind_a_filter_is_a_broken_group_by_the_deadline() -> None:
    """A full queue drops what comes, as a firewall does."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, socket.socket() as first:
        host, port = server.getsockname()
        first.connect((host, port))
        with spawn_ranks(join_alone, 1, f"gloo:{host}:{port}") as [rank]:
            started = time.monotonic()
            said = rank.receive()
    assert f"no gloo group of 2 at {host}:{port} within {SHORT_S:g} s" in said
    assert said.endswith("between nodes its ranks need open TCP ports")
    assert "\n" not in said
    assert time.monotonic() - started < LONG_S / 2


def meet_and_leave(rank: int, connection: Connection) -> None:
    """Rank 1 is seen at the meeting point and then cannot be reached."""
    if rank == 1:
        host, _, port = connection.recv().removeprefix("gloo:").rpartition(":")
        store = dist.TCPStore(host, int(port), 2, is_master=False, wait_for_workers=False)
        store.set("here/1", "")
        connection.send("was here")
        connection.recv()
    else:
        rendezvous = open_group(2, "cpu", same_host=False, host="127.0.0.1", deadline_s=LONG_S)
        connection.send(rendezvous.address)
        connection.recv()
        try:
            join_group(
                rendezvous.address, 0, 2, deadline_s=SHORT_S, step_deadline_s=SHORT_S, rendezvous=rendezvous
            )
        except GroupBroken as error:
            connection.send(str(error))


def test_ranks_that_meet_and_cannot_connect_are_a_broken_group_by_the_deadline() -> None:
    with spawn_ranks(meet_and_leave, 2) as ranks:
        introduce(ranks)
        assert ranks[1].receive() == "was here"
        ranks[0].send("go on")
        said = ranks[0].receive()
    assert re.fullmatch(r"rank 0: no gloo group of 2 at 127\.0\.0\.1:\d+ within 1 s: .+ open TCP ports", said), (
        said
    )


def test_who_did_not_come_to_the_meeting_point_is_named() -> None:
    rendezvous = open_group(3, "cpu", same_host=False, host="127.0.0.1", deadline_s=LONG_S)
    with pytest.raises(GroupBroken, match="rank 1, 2 did not come; between nodes"):
        join_group(rendezvous.address, 0, 3, deadline_s=SHORT_S, step_deadline_s=SHORT_S, rendezvous=rendezvous)


@pytest.mark.parametrize("kind", ["gloo", "nccl"])
def test_a_meeting_point_that_is_not_there_is_a_broken_group(kind: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(GroupBroken, match=f"no {kind} group of 2 at 127.0.0.1:{port}"):
        join_group(f"{kind}:127.0.0.1:{port}", 1, 2, deadline_s=SHORT_S, step_deadline_s=SHORT_S)


def test_an_unknown_address_is_refused() -> None:
    with pytest.raises(GroupBroken, match="'carrier-pigeon:1' is not the address of a group of 2"):
        join_group("carrier-pigeon:1", 0, 2, deadline_s=1, step_deadline_s=1)


def test_the_choice_is_logged_with_its_reason(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    open_group(2, "cpu", same_host=True, host="127.0.0.1", deadline_s=LONG_S).close()
    assert "through shared memory: 2 CPU ranks on one host" in caplog.text
    open_group(2, "cpu", same_host=False, host="127.0.0.1", deadline_s=LONG_S).close()
    assert "over gloo" in caplog.text
    assert "the ranks are on several hosts" in caplog.text
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    rendezvous = open_group(2, "cpu", same_host=True, host="127.0.0.1", deadline_s=LONG_S)
    assert rendezvous.address.startswith("gloo:127.0.0.1:")
    assert "this CPU is aarch64" in caplog.text


def test_no_room_for_shared_memory_falls_back_to_gloo(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("workers.process_group.Segment.create", refuse)
    rendezvous = open_group(2, "cpu", same_host=True, host="127.0.0.1", deadline_s=LONG_S)
    assert rendezvous.address.startswith("gloo:")
    assert "No space left" in caplog.text


def test_one_rank_needs_no_transport() -> None:
    rendezvous = open_group(1, "cpu", same_host=False, host="127.0.0.1", deadline_s=1)
    group = join_group(rendezvous.address, 0, 1, deadline_s=1, step_deadline_s=1, rendezvous=rendezvous)
    assert group.all_reduce(torch.ones(2)).tolist() == [1.0, 1.0]
    group.abort()
    group.close()


class SlowGroup(process_group._Alone):
    """Takes some time for each collective and notes that it was closed."""

    transport = "slow"

    def __init__(self) -> None:
        self.closed = False

    def all_reduce(self, tensor: Tensor) -> Tensor:
        time.sleep(0.01)
        return tensor

    all_gather = broadcast = all_reduce

    def close(self) -> None:
        self.closed = True


def test_time_in_collectives_is_counted_and_taken_once() -> None:
    group = TimedGroup(SlowGroup())
    for collective in (group.all_reduce, group.all_gather, group.broadcast):
        collective(torch.ones(1))
    assert group.take_seconds() >= 0.03
    assert group.take_seconds() == 0.0


def test_an_attached_group_takes_over_and_the_one_before_is_closed() -> None:
    first, second = SlowGroup(), SlowGroup()
    group = TimedGroup(first)
    group.attach(second)
    assert (first.closed, second.closed) == (True, False)
    assert (group.rank, group.size, group.transport) == (0, 1, "slow")
