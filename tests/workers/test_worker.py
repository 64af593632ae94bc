"""A rank's life: load, run, report, stop, and the next incarnation; most of it with two real processes."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.checkpoints import write_counter_model
from tests.fakes.worker_configs import tiny_worker_config
from tests.workers.processes import Rank, spawn_ranks
from workers.channel import DriverChannel
from workers.config import WorkerConfig
from workers.errors import OutOfMemory, WorkerError
from workers.protocol import (
    KnownSequence,
    NewSequence,
    SamplingSettings,
    SequenceId,
    SequenceOutput,
    StepFailure,
    StepPlan,
    StepResult,
    StopWorkers,
)
from workers.reports import CodeIdentity
from workers.worker import Worker

DEADLINE_S = 60.0
GREEDY = SamplingSettings(temperature=0.0, top_k=0, top_p=1.0, seed=0, choice=0)
SEQUENCE = SequenceId(1)
NUM_BLOCKS = 8


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> WorkerConfig:
    folder = write_counter_model(tmp_path_factory.mktemp("counter"))
    return tiny_worker_config(folder, 2, step_deadline_s=DEADLINE_S, start_deadline_s=DEADLINE_S)


def first_plan(incarnation: int) -> StepPlan:
    new = NewSequence(SEQUENCE, (65, 66, 67), 3, GREEDY, (0, 1), 0, 3)
    return StepPlan(incarnation, 0, new=(new,))


def next_plan(incarnation: int, step: int) -> StepPlan:
    return StepPlan(incarnation, step, known=(KnownSequence(SEQUENCE, 1),))


def counted(driver: DriverChannel, incarnation: int, steps: int) -> list[int]:
    """The tokens that the counter model gives in `steps` steps, two plans in flight."""
    driver.send(first_plan(incarnation))
    tokens: list[int] = []
    for step in range(1, steps + 1):
        if step < steps:
            driver.send(next_plan(incarnation, step))
        message = driver.receive(DEADLINE_S)
        assert isinstance(message, StepResult), message
        [output] = message.outputs
        assert output.sequence_id == SEQUENCE
        tokens += output.token_ids
    return tokens


# Ranks as processes: what a method call gives comes back through the pipe; `run` has a thread, as in the actor.


def worker_main(rank: int, connection: Connection, config: WorkerConfig) -> None:
    worker = Worker(rank, config)
    while True:
        method, arguments = connection.recv()
        if method == "run":
            threading.Thread(target=lambda given=arguments: connection.send(worker.run(*given))).start()
        else:
            connection.send(getattr(worker, method)(*arguments))


def call(rank: Rank, method: str, *arguments: Any) -> Any:
    rank.send((method, arguments))
    return rank.receive()


def call_all(ranks: list[Rank], method: str, *arguments: Any) -> list[Any]:
    for rank in ranks:
        rank.send((method, arguments))
    return [rank.receive() for rank in ranks]


def join(ranks: list[Rank]) -> list[Any]:
    return call_all(ranks, "join_group", call(ranks[0], "open_group", True))


@contextmanager
def running(ranks: list[Rank], incarnation: int) -> Iterator[DriverChannel]:
    call_all(ranks, "allocate", NUM_BLOCKS)
    driver = DriverChannel(len(ranks), incarnation, send_deadline_s=DEADLINE_S)
    try:
        for rank, endpoint in zip(ranks, driver.endpoints, strict=True):
            rank.send(("run", (endpoint,)))
        yield driver
    finally:
        driver.close()


def test_two_ranks_count_in_step_and_do_it_again_in_the_next_incarnation_with_the_same_weights(
    config: WorkerConfig,
) -> None:
    with spawn_ranks(worker_main, 2, config) as ranks:
        assert join(ranks) == ["shared memory"] * 2
        assert [report.rank for report in call_all(ranks, "load")] == [0, 1]
        with running(ranks, 0) as driver:
            assert counted(driver, 0, 5) == [68, 69, 70, 71, 72]
            driver.send(StopWorkers(0))
            assert [rank.receive() for rank in ranks] == ["the driver stopped this incarnation"] * 2
        assert join(ranks) == ["shared memory"] * 2
        with running(ranks, 1) as driver:
            assert counted(driver, 1, 3) == [68, 69, 70]
            driver.send(StopWorkers(1))
            assert [rank.receive() for rank in ranks] == ["the driver stopped this incarnation"] * 2


def test_a_peers_death_in_a_step_is_reported_at_once_and_ends_the_loop(config: WorkerConfig) -> None:
    with spawn_ranks(worker_main, 2, config) as ranks:
        join(ranks)
        call_all(ranks, "load")
        with running(ranks, 0) as driver:
            assert counted(driver, 0, 2) == [68, 69]
            os.kill(ranks[1].pid, signal.SIGSTOP)  # so that the step is under way when the death comes
            driver.send(next_plan(0, 2))
            started = time.monotonic()
            ranks[1].kill()
            failure = driver.receive(DEADLINE_S)
            assert isinstance(failure, StepFailure)
            assert (failure.rank, failure.step, failure.incarnation) == (0, 2, 0)
            assert "rank 1 died" in failure.message
            assert "all_reduce" in failure.traceback
            assert time.monotonic() - started < DEADLINE_S / 2
            assert "rank 1 died" in ranks[0].receive()


def test_a_stop_frees_a_rank_that_waits_for_a_peer(config: WorkerConfig) -> None:
    with spawn_ranks(worker_main, 2, config) as ranks:
        join(ranks)
        call_all(ranks, "load")
        with running(ranks, 0) as driver:
            assert counted(driver, 0, 1) == [68]
            os.kill(ranks[1].pid, signal.SIGSTOP)
            driver.send(next_plan(0, 1))
            ranks[0].send(("stop", ()))
            endings = [ranks[0].receive(), ranks[0].receive()]  # of `stop` and of `run`, in either order
            endings.remove(None)
            assert "a stop was asked for" in endings[0]  # before the plan was read, or in the step


@pytest.fixture
def alone(config: WorkerConfig) -> Iterator[Worker]:
    worker = Worker(0, replace(config, tensor_parallel_size=1))
    worker.join_group(worker.open_group(True))
    yield worker
    worker.close()


@contextmanager
def run_in_thread(worker: Worker, driver: DriverChannel, **changes: Any) -> Iterator[Callable[[], str]]:
    """`run` in a thread; yields a call that waits for its end."""
    [endpoint] = driver.endpoints
    outcome: list[str] = []
    thread = threading.Thread(target=lambda: outcome.append(worker.run(replace(endpoint, **changes))))
    thread.start()

    def ended() -> str:
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), "run did not end"
        return outcome[0]

    try:
        yield ended
    finally:
        worker.stop()
        thread.join(DEADLINE_S)


@pytest.fixture
def driver() -> Iterator[DriverChannel]:
    channel = DriverChannel(1, 0, send_deadline_s=DEADLINE_S)
    yield channel
    channel.close()


def test_the_load_report_has_the_shards_numbers(alone: Worker) -> None:
    report = alone.load()
    assert report.rank == 0
    hidden, ffn, vocab = 320, 64, 260
    attention = 2 * hidden * 64 + 2 * hidden * 32  # 4 query heads and 2 KV heads of 16
    expected = 2 * vocab * hidden + attention + 3 * hidden * ffn + 3 * hidden
    assert report.weight_bytes == 4 * expected
    assert report.bytes_per_block == 2 * 2 * 16 * 4 * 4  # keys and values, heads, head_dim, tokens, bytes
    assert report.seconds > 0
    assert report.free_memory > 0


def test_a_result_has_the_wait_for_its_plan_among_its_timings(alone: Worker, driver: DriverChannel) -> None:
    alone.load()
    alone.allocate(NUM_BLOCKS)
    with run_in_thread(alone, driver):
        time.sleep(0.5)  # the thread is waiting long before this is over
        driver.send(first_plan(0))
        result = driver.receive(DEADLINE_S)
    assert isinstance(result, StepResult)
    assert result.outputs == (SequenceOutput(SEQUENCE, (68,)),)
    assert result.timings.wait >= 0.1
    assert result.timings.forward > 0


def test_a_plan_that_cannot_be_is_reported_with_its_traceback(alone: Worker, driver: DriverChannel) -> None:
    alone.load()
    alone.allocate(NUM_BLOCKS)
    with run_in_thread(alone, driver) as ended:
        driver.send(next_plan(0, 0))  # of a sequence that no plan has brought
        failure = driver.receive(DEADLINE_S)
        assert isinstance(failure, StepFailure)
        assert failure.message.startswith("ProtocolError: ")
        assert "Traceback" in failure.traceback
        assert ended() == failure.message


def test_a_stop_ends_an_idle_run_and_one_that_is_about_to_start(alone: Worker, driver: DriverChannel) -> None:
    alone.load()
    alone.allocate(NUM_BLOCKS)
    with run_in_thread(alone, driver) as ended:
        alone.stop()
        assert "a stop was asked for" in ended()
    with run_in_thread(alone, driver) as ended:
        assert "a stop was asked for" in ended()


def sleep(_: int, connection: Connection) -> None:
    connection.send("here")
    connection.recv()


def test_the_drivers_death_ends_the_run(alone: Worker, driver: DriverChannel) -> None:
    alone.load()
    alone.allocate(NUM_BLOCKS)
    with spawn_ranks(sleep, 1) as [stand_in]:
        stand_in.receive()
        with run_in_thread(alone, driver, driver_pid=stand_in.pid) as ended:
            stand_in.kill()
            assert f"the driver, process {stand_in.pid}, has ended" in ended()


def test_incarnations_leave_no_descriptor_behind(alone: Worker) -> None:
    alone.load()
    open_descriptors = []
    for incarnation in range(3):
        alone.join_group(alone.open_group(True))
        alone.allocate(NUM_BLOCKS)
        channel = DriverChannel(1, incarnation, send_deadline_s=DEADLINE_S)
        with run_in_thread(alone, channel):
            assert counted(channel, incarnation, 2) == [68, 69]
        channel.close()
        open_descriptors.append(len(os.listdir("/proc/self/fd")))
    assert open_descriptors[1] == open_descriptors[2]


def test_calls_out_of_order_are_refused(config: WorkerConfig, driver: DriverChannel) -> None:
    with ExitStack() as stack:
        worker = Worker(1, config)
        stack.callback(worker.close)
        with pytest.raises(WorkerError, match="rank 1: load was called before join_group of 2 ranks"):
            worker.load()
        with pytest.raises(WorkerError, match="rank 1: run was called before allocate"):
            worker.run(driver.endpoints[0])


def test_allocating_needs_weights_and_room(alone: Worker) -> None:
    with pytest.raises(WorkerError, match="allocate was called before load"):
        alone.allocate(NUM_BLOCKS)
    alone.load()
    with pytest.raises(OutOfMemory):
        alone.allocate(2**40)


def test_identify_says_which_code_runs(alone: Worker) -> None:
    identity = alone.identify()
    assert (identity.rank, identity.pid) == (0, os.getpid())
    files = dict(identity.code.files)
    assert Path(files["workers"]) == Path(__file__).parents[2] / "workers" / "__init__.py"
    assert set(files) == {"cluster", "workers", "model_shards"}


def test_code_differs_by_version_anywhere_and_by_path_on_one_node() -> None:
    mine = CodeIdentity("1.0", (("workers", "/site/workers/__init__.py"),))
    assert mine.difference(mine, same_node=True) is None
    newer = replace(mine, version="1.1")
    assert "1.1" in str(mine.difference(newer, same_node=False))
    shadowed = replace(mine, files=(("workers", "/elsewhere/workers/__init__.py"),))
    assert mine.difference(shadowed, same_node=False) is None
    message = str(mine.difference(shadowed, same_node=True))
    assert "/elsewhere/workers/__init__.py" in message
    assert "shadows" in message
