"""An ingress's connection against a real driver and engine over a scripted worker group."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from cluster.driver import connection as connection_module
from cluster.driver.connection import DriverConnection
from cluster.driver.driver import Driver
from cluster.errors import Overloaded, Unavailable
from cluster.generation import FinishReason
from tests.cluster.driver.far_driver import SERVE_REQUEST, FarDriver
from tests.cluster.driver.rig import DriverRig, count_from, eventually, scripted, tokens

Connect = Callable[..., Awaitable[tuple[DriverConnection, FarDriver]]]


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    rig = DriverRig()
    opened: list[tuple[DriverConnection, Driver]] = []

    async def connect(**options: object) -> tuple[DriverConnection, FarDriver]:
        settings = options.pop("settings", {})
        clock = options.pop("clock", time.monotonic)
        driver = await rig.start(scripted(**options), **settings)  # type: ignore[arg-type]
        far = FarDriver(driver)
        connection = DriverConnection(far, clock)  # type: ignore[arg-type]
        connection.start()
        await connection.wait_connected(60)
        opened.append((connection, driver))
        return connection, far

    yield connect
    for connection, driver in opened:
        await connection.close()
        await driver.stop()


async def test_thirty_two_streams_over_one_subscription_are_all_exact(connect: Connect) -> None:
    connection, _ = await connect()

    answers = await asyncio.gather(*(tokens(connection.stream(count_from(10 * i, 20 + i))) for i in range(32)))

    for i, answer in enumerate(answers):
        assert answer == list(range(10 * i + 1, 10 * i + 21 + i))


async def test_every_choice_ends_once(connect: Connect) -> None:
    connection, _ = await connect()

    deltas = [delta async for delta in connection.stream(count_from(5, 7, n=3))]

    for choice in range(3):
        mine = [delta for delta in deltas if delta.choice == choice]
        assert [token for delta in mine for token in delta.token_ids] == list(range(6, 13))
        assert [delta.finish_reason for delta in mine if delta.finish_reason] == [FinishReason.LENGTH]


async def test_leaving_a_stream_aborts_it(connect: Connect) -> None:
    connection, far = await connect(step_time_s=0.01)
    assert far.driver is not None
    engine = far.driver._engine

    stream = connection.stream(count_from(1, 400))
    await anext(stream)
    await stream.aclose()

    await eventually(lambda: engine.stats().finished.get(FinishReason.ABORT) == 1)
    assert engine.stats().free_blocks == engine.stats().total_blocks
    assert far.driver._subscriptions.num_requests == 0


async def test_a_cancelled_reader_aborts_its_request(connect: Connect) -> None:
    connection, far = await connect(step_time_s=0.01)
    assert far.driver is not None
    engine = far.driver._engine
    reader = asyncio.create_task(tokens(connection.stream(count_from(1, 400))))
    await eventually(lambda: engine.stats().running == 1)

    reader.cancel()

    await eventually(lambda: engine.stats().finished.get(FinishReason.ABORT) == 1)


async def test_a_cancellation_that_comes_with_the_drivers_answer_is_not_lost(connect: Connect) -> None:
    connection, far = await connect(step_time_s=0.01)
    far.answer = asyncio.get_running_loop().create_future()
    reader = asyncio.create_task(tokens(connection.stream(count_from(1, 400, "left"))))
    await eventually(lambda: far.num_submitted == 1)

    far.answer.set_result(None)
    await asyncio.sleep(0)  # the submission ends, and its waiter is about to be told
    reader.cancel()

    await eventually(reader.done)
    assert reader.cancelled()
    await eventually(lambda: "left" in far.aborts)


async def test_the_drivers_calls_do_not_belong_to_the_request(connect: Connect) -> None:
    """Serve cancels, with a request, all calls made in its context: an abort must not be one of them."""
    connection, far = await connect(step_time_s=0.01)
    SERVE_REQUEST.set("a request that is about to be cancelled")
    stream = connection.stream(count_from(1, 400))
    await anext(stream)
    await stream.aclose()
    await eventually(lambda: bool(far.aborts))

    assert far.contexts == {"submit": None, "abort": None}


async def test_finishing_one_choice_leaves_the_others(connect: Connect) -> None:
    connection, far = await connect(step_time_s=0.01)
    seen: dict[int, list[int]] = {0: [], 1: []}

    async for delta in connection.stream(count_from(1, 100, "two", n=2)):
        seen[delta.choice] += delta.token_ids
        if len(seen[0]) >= 5 and not far.finishes:
            await connection.finish_choice("two", 0)

    assert seen[1] == list(range(2, 102))
    assert len(seen[0]) < 100
    assert far.finishes == [("two", 0)]
    assert seen[0] == list(range(2, 2 + len(seen[0])))


async def test_finishing_the_last_choice_ends_the_stream(connect: Connect) -> None:
    connection, _ = await connect(step_time_s=0.01)
    stream = connection.stream(count_from(1, 400, "one"))
    await anext(stream)

    await connection.finish_choice("one", 0)

    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_too_many_waiting_is_the_drivers_refusal(connect: Connect) -> None:
    connection, far = await connect(
        step_time_s=0.02, settings={"max_num_seqs": 1, "max_num_batched_tokens": 8, "max_waiting_requests": 1}
    )
    running = connection.stream(count_from(1, 400, "running"))
    await anext(running)
    waiting = asyncio.create_task(tokens(connection.stream(count_from(1, 5, "waiting"))))
    await eventually(lambda: far.num_submitted == 2)

    with pytest.raises(Overloaded):
        await anext(connection.stream(count_from(1, 5, "refused")))

    await running.aclose()
    assert await waiting == [2, 3, 4, 5, 6]


async def test_a_drivers_death_fails_what_is_open_and_its_successor_is_found(connect: Connect) -> None:
    connection, far = await connect(step_time_s=0.01)
    stream = connection.stream(count_from(1, 400))
    await anext(stream)
    dead = far.driver

    far.lose()
    with pytest.raises(Unavailable, match="gone"):
        await tokens(stream)
    with pytest.raises(Unavailable):
        await anext(connection.stream(count_from(1, 5)))
    cause = connection.unavailable_because
    assert cause is not None

    rig = DriverRig()
    successor = await rig.start()
    far.replace(successor)
    await connection.wait_connected(60)
    assert await tokens(connection.stream(count_from(1, 5))) == [2, 3, 4, 5, 6]
    assert connection.unavailable_because is None
    assert dead is not None
    await dead.stop()
    await connection.close()
    await successor.stop()


async def test_a_failed_group_is_a_clear_error_to_open_streams(connect: Connect) -> None:
    connection, _ = await connect(die_at_step=5, settings={"max_recoveries": 0})

    with pytest.raises(Unavailable, match="a rank died in step 5"):
        await tokens(connection.stream(count_from(1, 100)))

    await eventually(lambda: connection.unavailable_because is not None)
    with pytest.raises(Unavailable):
        await anext(connection.stream(count_from(1, 5)))


async def test_streams_go_on_over_deaths(connect: Connect) -> None:
    connection, far = await connect(die_at_step=5, next_deaths=[2, 0, 9], settings={"max_num_seqs": 4})
    assert far.driver is not None
    starts = range(1, 600, 100)
    streams = [tokens(connection.stream(count_from(start, 50, n=1))) for start in starts]
    assert await asyncio.gather(*streams) == [list(range(start + 1, start + 51)) for start in starts]
    assert (await far.driver.stats()).recoveries == 4


async def test_an_expired_lease_fails_what_was_open(connect: Connect) -> None:
    connection, far = await connect(step_time_s=0.01)
    assert far.driver is not None
    stream = connection.stream(count_from(1, 400))
    await anext(stream)

    far.driver._subscriptions._lease_s = -1.0  # the next renewal is already too late
    far.driver._subscriptions.renew(connection._subscriber_id)
    far.driver._subscriptions._lease_s = 3.0

    with pytest.raises(Unavailable, match="lease"):
        await tokens(stream)
    await connection.wait_connected(60)
    assert await tokens(connection.stream(count_from(1, 3, "next"))) == [2, 3, 4]


@pytest.fixture
def quick_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "HEARTBEAT_S", 0.01)
    monkeypatch.setattr(connection_module, "LEASE_S", 0.2)


async def failed_by_silence(connection: DriverConnection, far: FarDriver, num_tokens: int) -> None:
    """A request fails because the driver says nothing any more; then it speaks again."""
    stream = connection.stream(count_from(1, num_tokens))
    await anext(stream)
    far.deaf = far.mute = True
    with pytest.raises(Unavailable, match="has said nothing for"):
        await tokens(stream)
    far.deaf = far.mute = False
    await connection.wait_connected(60)


@pytest.mark.usefixtures("quick_lease")
async def test_a_driver_that_says_nothing_more_fails_what_is_open(connect: Connect) -> None:
    connection, far = await connect(step_time_s=0.01)
    await failed_by_silence(connection, far, 400)
    assert await tokens(connection.stream(count_from(1, 3, "next"))) == [2, 3, 4]


@pytest.mark.usefixtures("quick_lease")
async def test_what_failed_with_a_silent_driver_does_not_run_on_there(connect: Connect) -> None:
    connection, far = await connect(step_time_s=0.05)
    assert far.driver is not None
    engine = far.driver._engine
    far.driver._subscriptions._lease_s = 0.5
    await failed_by_silence(connection, far, 480)

    await eventually(lambda: engine.stats().running == 0)
    assert engine.stats().finished[FinishReason.ABORT] == 1


@pytest.mark.usefixtures("quick_lease")
async def test_a_slow_driver_hears_of_every_end_in_the_end(connect: Connect) -> None:
    connection, far = await connect(step_time_s=0.05)
    assert far.driver is not None
    engine = far.driver._engine
    left, stopped = connection.stream(count_from(1, 480, "left")), connection.stream(count_from(1, 480, "stopped"))
    await asyncio.gather(anext(left), anext(stopped))
    far.slow_calls = 3

    await left.aclose()
    await connection.finish_choice("stopped", 0)

    await eventually(lambda: engine.stats().running == 0)
    finished = engine.stats().finished
    assert (finished[FinishReason.ABORT], finished[FinishReason.STOP]) == (1, 1)


@pytest.mark.usefixtures("quick_lease")
async def test_a_driver_that_sends_tokens_is_alive_without_heartbeats(connect: Connect) -> None:
    now = [0.0]
    connection, far = await connect(step_time_s=0.005, clock=lambda: now[0])
    stream = connection.stream(count_from(1, 300))
    await anext(stream)

    far.deaf = True
    last: tuple[int, ...] = ()
    async for delta in stream:
        now[0] += 0.05  # between two tokens, however slow the machine is
        last = delta.token_ids

    assert last[-1] == 301


@pytest.mark.usefixtures("quick_lease")
async def test_a_stall_of_our_own_fails_nothing(connect: Connect) -> None:
    now = [0.0]
    connection, far = await connect(step_time_s=0.01, clock=lambda: now[0])
    stream = connection.stream(count_from(1, 200))
    await anext(stream)
    far.mute = True  # nothing but the heartbeat can end the silence

    for _ in range(5):
        now[0] += 3600.0
        await asyncio.sleep(0.02)

    assert connection.unavailable_because is None
    await stream.aclose()


async def test_nothing_is_taken_after_close(connect: Connect) -> None:
    connection, _ = await connect(step_time_s=0.01)
    stream = connection.stream(count_from(1, 400))
    await anext(stream)

    await connection.close()
    await connection.close()

    with pytest.raises(Unavailable, match="stopping"):
        await tokens(stream)
    with pytest.raises(Unavailable):
        await anext(connection.stream(count_from(1, 5)))


async def test_no_driver_by_the_deadline(connect: Connect) -> None:
    _, far = await connect()
    far.lose()
    lonely = DriverConnection(far)
    lonely.start()
    with pytest.raises(Unavailable, match=r"no driver within 0\.05 s"):
        await lonely.wait_connected(0.05)
    await lonely.close()
