"""Step channel: order, incarnations, deadlines and what is left behind, over ipc and over tcp with CURVE."""

import os
import stat
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import zmq

from tests.workers.processes import spawn_ranks
from workers.channel import DriverChannel, WorkerChannel, WorkerEndpoint
from workers.curve import ClientKeys
from workers.errors import ChannelError, ChannelInterrupted, ChannelTimeout, ProtocolError
from workers.protocol import (
    KnownSequence,
    SequenceId,
    SequenceOutput,
    StepFailure,
    StepPlan,
    StepResult,
    StopWorkers,
)

SOON_S = 0.05  # a wait that must fail
LATEST_S = 60.0  # a wait that must succeed
HOSTS = pytest.mark.parametrize("host", [None, "127.0.0.1", "::1"])


def plan(step: int, incarnation: int = 3) -> StepPlan:
    return StepPlan(incarnation, step, known=(KnownSequence(SequenceId(step), 1),))


def result(step: int, incarnation: int = 3) -> StepResult:
    return StepResult(incarnation, step, (SequenceOutput(SequenceId(step), (step,)),))


@contextmanager
def opened(size: int, host: str | None = None) -> Iterator[tuple[DriverChannel, list[WorkerChannel]]]:
    with ExitStack() as stack:
        driver = DriverChannel(size, 3, host=host, send_deadline_s=LATEST_S)
        stack.callback(driver.close)
        workers = [WorkerChannel(endpoint) for endpoint in driver.endpoints]
        for worker in workers:
            stack.callback(worker.close)
        yield driver, workers


@HOSTS
def test_plans_reach_every_rank_and_results_come_back_in_order(host: str | None) -> None:
    with opened(3, host) as (driver, workers):
        for step in range(2):  # two in flight
            driver.send(plan(step))
        for step in range(2):
            assert [worker.receive(LATEST_S) for worker in workers] == [plan(step)] * 3
            workers[0].send(result(step))
        assert [driver.receive(LATEST_S) for _ in range(2)] == [result(0), result(1)]
        driver.send(StopWorkers(3))
        assert [worker.receive(LATEST_S) for worker in workers] == [StopWorkers(3)] * 3


def test_a_failure_comes_from_any_rank() -> None:
    failure = StepFailure(3, 0, 1, "ValueError: no", "Traceback")
    with opened(2) as (driver, workers):
        workers[1].send(failure)
        assert driver.receive(LATEST_S) == failure


def test_other_incarnations_are_dropped_with_a_log(caplog: pytest.LogCaptureFixture) -> None:
    with opened(1) as (driver, [worker]):
        driver.send(plan(0, incarnation=2))
        driver.send(plan(0))
        assert worker.receive(LATEST_S) == plan(0)
        worker.send(result(0, incarnation=4))
        worker.send(result(0))
        assert driver.receive(LATEST_S) == result(0)
    assert "dropped a StepPlan of incarnation 2, now is 3" in caplog.text
    assert "dropped a StepResult of incarnation 4, now is 3" in caplog.text


def test_a_step_out_of_order_is_refused_at_both_ends() -> None:
    with opened(1) as (driver, [worker]):
        driver.send(plan(1))
        with pytest.raises(ProtocolError, match="step 1 came, expected 0"):
            worker.receive(LATEST_S)
        worker.send(result(0))
        worker.send(result(0))
        driver.receive(LATEST_S)
        with pytest.raises(ProtocolError, match="step 0 came, expected 1"):
            driver.receive(LATEST_S)


def test_every_wait_has_a_deadline_and_names_what_it_waited_for() -> None:
    driver = DriverChannel(2, 3, send_deadline_s=SOON_S)
    with pytest.raises(ChannelTimeout, match="rank 0 to take a message"):
        driver.send(plan(0))
    with pytest.raises(ChannelTimeout, match="a message from the ranks"):
        driver.receive(SOON_S)
    worker = WorkerChannel(driver.endpoints[0], send_deadline_s=SOON_S)
    with pytest.raises(ChannelTimeout, match="a message from the driver"):
        worker.receive(SOON_S)
    worker.close()
    driver.close()


def test_a_watched_descriptor_cuts_a_wait_short_but_not_what_has_arrived() -> None:
    read_end, write_end = os.pipe()
    with opened(1) as (driver, [worker]):
        driver.watch(read_end, "rank 0 has died")
        worker.send(result(0))
        worker.send(result(1))
        assert driver.receive(LATEST_S) == result(0)
        threading.Timer(SOON_S, os.write, (write_end, b"x")).start()
        assert driver.receive(LATEST_S) == result(1)
        with pytest.raises(ChannelInterrupted, match="rank 0 has died"):
            driver.receive(LATEST_S)
        driver.unwatch(read_end)
        with pytest.raises(ChannelTimeout):
            driver.receive(SOON_S)
    os.close(read_end)
    os.close(write_end)


def test_a_send_that_waits_is_interrupted_too() -> None:
    read_end, write_end = os.pipe()
    os.write(write_end, b"x")
    driver = DriverChannel(1, 3, send_deadline_s=LATEST_S)
    driver.watch(read_end, "rank 0 has died")
    with pytest.raises(ChannelInterrupted, match="rank 0 to take a message: rank 0 has died"):
        driver.send(plan(0))
    driver.close()
    os.close(read_end)
    os.close(write_end)


def test_the_socket_folder_is_private_and_goes_with_close() -> None:
    driver = DriverChannel(2, 3)
    paths = {Path(endpoint.plans.removeprefix("ipc://")) for endpoint in driver.endpoints}
    [folder] = {path.parent for path in paths}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert all(path.is_socket() and len(os.fsencode(path)) <= 107 for path in paths)
    driver.close()
    driver.close()
    assert not folder.exists()


def test_a_temporary_folder_with_a_long_path_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with opened(1) as (driver, [worker]):
        driver.send(plan(0))
        assert worker.receive(LATEST_S) == plan(0)
    assert list(long.iterdir()) == []


def open_driver(_: int, connection: Connection) -> None:
    driver = DriverChannel(1, 0)
    connection.send(driver.endpoints[0].plans)
    connection.recv()


def test_a_new_driver_clears_away_what_a_killed_one_left() -> None:
    with spawn_ranks(open_driver, 1) as [other]:
        left = Path(other.receive().removeprefix("ipc://")).parent
        other.kill()
        assert left.exists()
        DriverChannel(1, 0).close()
        assert not left.exists()


def test_keys_and_addresses_are_new_for_each_channel() -> None:
    channels = [DriverChannel(2, incarnation, host="127.0.0.1") for incarnation in (0, 1)]
    endpoints = [endpoint for channel in channels for endpoint in channel.endpoints]
    for channel in channels:
        channel.close()
    assert len({endpoint.keys.secret for endpoint in endpoints if endpoint.keys}) == 4
    assert len({endpoint.keys.server_public for endpoint in endpoints if endpoint.keys}) == 2
    assert len({endpoint.plans for endpoint in endpoints}) == 4


def strangers(endpoint: WorkerEndpoint, other: WorkerEndpoint) -> dict[str, WorkerEndpoint]:
    """Endpoints of clients that must not get in; each knows the address and the server's public key."""
    assert endpoint.keys is not None
    public, secret = zmq.curve_keypair()
    return {
        "no keys": replace(endpoint, keys=None),
        "keys of its own": replace(endpoint, keys=ClientKeys(endpoint.keys.server_public, public, secret)),
        "keys of another rank": replace(endpoint, keys=other.keys),
    }


@pytest.mark.parametrize("who", ["no keys", "keys of its own", "keys of another rank"])
def test_over_the_network_a_rank_gets_its_plans_and_nobody_else_does(who: str) -> None:
    driver = DriverChannel(2, 3, host="127.0.0.1", send_deadline_s=SOON_S)
    stranger = WorkerChannel(strangers(*driver.endpoints)[who])
    with pytest.raises(ChannelTimeout, match="rank 0"):
        driver.send(plan(0))  # had the stranger been let in, the socket would have someone to send to
    workers = [WorkerChannel(endpoint) for endpoint in driver.endpoints]
    driver.send_deadline_s = LATEST_S
    driver.send(plan(0))
    assert [worker.receive(LATEST_S) for worker in workers] == [plan(0)] * 2
    with pytest.raises(ChannelTimeout):
        stranger.receive(SOON_S)
    for worker in (stranger, *workers):
        worker.close()
    driver.close()


def test_a_stranger_cannot_send_results() -> None:
    with opened(1, "127.0.0.1") as (driver, [worker]):
        stranger = WorkerChannel(strangers(*driver.endpoints, *driver.endpoints)["keys of its own"])
        stranger.send(result(0))
        with pytest.raises(ChannelTimeout):
            driver.receive(10 * SOON_S)
        worker.send(result(0))
        assert driver.receive(LATEST_S) == result(0)
        stranger.close()


def test_secret_keys_are_not_shown() -> None:
    driver = DriverChannel(1, 0, host="127.0.0.1")
    [endpoint] = driver.endpoints
    driver.close()
    assert endpoint.keys is not None
    assert endpoint.keys.secret.decode() not in repr(endpoint)


def test_a_host_that_is_not_here_is_refused_with_its_name() -> None:
    with pytest.raises(ChannelError, match=r"192\.0\.2\.1"):
        DriverChannel(1, 0, host="192.0.2.1")
