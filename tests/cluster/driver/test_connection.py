"""An ingress's connection against a real driver and engine over a scripted worker group."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar

import pytest

from cluster.driver import connection as connection_module
from cluster.driver.connection import DriverConnection
from cluster.driver.driver import Driver
from cluster.driver.status import DriverStatus
from cluster.errors import Overloaded, Unavailable
from cluster.generation import FinishReason, GenerationRequest, TokenDelta
from tests.cluster.driver.rig import DriverRig, count_from, scripted

SERVE_REQUEST: ContextVar[str | None] = ContextVar("SERVE_REQUEST", default=None)


class Switchboard:
    """A driver handle that can lose its driver and be given another, as a Serve handle can."""

    def __init__(self, driver: Driver) -> None:
        self.driver: Driver | None = driver
        self.lost = asyncio.Event()
        self.deaf = False  # heartbeats get no answer
        self.mute = False  # messages do not arrive
        self.slow_calls = 0  # so many calls to end something get no answer
        self.answer: asyncio.Future[None] | None = None  # of a submission, when it is to be held back
        self.aborts: list[str] = []
        self.finishes: list[tuple[str, int]] = []
        self.contexts: dict[str, str | None] = {}

    def lose(self) -> None:
        self.driver = None
        self.lost.set()

    def replace(self, driver: Driver) -> None:
        self.driver = driver
        self.lost = asyncio.Event()

    async def subscribe(self, subscriber_id: str) -> AsyncIterator[bytes]:
        messages = self._here().subscribe(subscriber_id)
        lost = asyncio.ensure_future(self.lost.wait())
        while True:
            message = asyncio.ensure_future(anext(messages))
            await asyncio.wait((message, lost), return_when=asyncio.FIRST_COMPLETED)
            if not message.done():
                message.cancel()
                raise Unavailable("the replica is gone")
            try:
                data = message.result()
            except StopAsyncIteration:
                return
            if not self.mute:
                yield data

    async def submit(self, subscriber_id: str, request: GenerationRequest) -> None:
        self.contexts["submit"] = SERVE_REQUEST.get()
        await self._here().submit(subscriber_id, request)
        if self.answer is not None:
            await self.answer

    async def abort(self, request_id: str) -> None:
        self.contexts["abort"] = SERVE_REQUEST.get()
        self.aborts.append(request_id)
        self._answer_late()
        await self._here().abort(request_id)

    async def finish_choice(self, request_id: str, choice: int) -> None:
        self.finishes.append((request_id, choice))
        self._answer_late()
        await self._here().finish_choice(request_id, choice)

    async def heartbeat(self, subscriber_id: str) -> DriverStatus:
        if self.deaf:
            await asyncio.sleep(60)
        return await self._here().heartbeat(subscriber_id)

    def _answer_late(self) -> None:
        if self.slow_calls:
            self.slow_calls -= 1
            raise Unavailable("the driver did not answer within 5 s")

    def _here(self) -> Driver:
        if self.driver is None:
            raise Unavailable("the replica is gone")
        return self.driver


Connect = Callable[..., Awaitable[tuple[DriverConnection, Switchboard]]]


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    rig = DriverRig()
    opened: list[tuple[DriverConnection, Driver]] = []

    async def connect(**options: object) -> tuple[DriverConnection, Switchboard]:
        settings = options.pop("settings", {})
        clock = options.pop("clock", time.monotonic)
        driver = await rig.start(scripted(**options), **settings)  # type: ignore[arg-type]
        switchboard = Switchboard(driver)
        connection = DriverConnection(switchboard, clock)  # type: ignore[arg-type]
        connection.start()
        await connection.wait_connected(5)
        opened.append((connection, driver))
        return connection, switchboard

    yield connect
    for connection, driver in opened:
        await connection.close()
        await driver.stop()


async def tokens(deltas: AsyncIterator[TokenDelta]) -> list[int]:
    return [token async for delta in deltas for token in delta.token_ids]


async def eventually(condition: Callable[[], bool]) -> None:
    async def poll() -> None:
        while not condition():
            await asyncio.sleep(0.005)

    await asyncio.wait_for(poll(), 10)


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
    connection, switchboard = await connect(step_time_s=0.002)
    assert switchboard.driver is not None
    engine = switchboard.driver._engine

    stream = connection.stream(count_from(1, 400))
    await anext(stream)
    await stream.aclose()

    await eventually(lambda: engine.stats().finished.get(FinishReason.ABORT) == 1)
    assert engine.stats().free_blocks == engine.stats().total_blocks
    assert switchboard.driver._subscriptions.num_requests == 0


async def test_a_cancelled_reader_aborts_its_request(connect: Connect) -> None:
    connection, switchboard = await connect(step_time_s=0.002)
    assert switchboard.driver is not None
    engine = switchboard.driver._engine
    reader = asyncio.create_task(tokens(connection.stream(count_from(1, 400))))
    await eventually(lambda: engine.stats().running == 1)

    reader.cancel()

    await eventually(lambda: engine.stats().finished.get(FinishReason.ABORT) == 1)


async def test_a_cancellation_that_comes_with_the_drivers_answer_is_not_lost(connect: Connect) -> None:
    connection, switchboard = await connect(step_time_s=0.002)
    switchboard.answer = asyncio.get_running_loop().create_future()
    reader = asyncio.create_task(tokens(connection.stream(count_from(1, 400, "left"))))
    await asyncio.sleep(0.01)

    switchboard.answer.set_result(None)
    await asyncio.sleep(0)  # the submission ends, and its waiter is about to be told
    reader.cancel()

    await asyncio.wait((reader,), timeout=0.2)
    assert reader.cancelled()
    await eventually(lambda: "left" in switchboard.aborts)


async def test_the_drivers_calls_do_not_belong_to_the_request(connect: Connect) -> None:
    """Serve cancels, with a request, all calls made in its context: an abort must not be one of them."""
    connection, switchboard = await connect(step_time_s=0.002)
    SERVE_REQUEST.set("a request that is about to be cancelled")
    stream = connection.stream(count_from(1, 400))
    await anext(stream)
    await stream.aclose()
    await eventually(lambda: bool(switchboard.aborts))

    assert switchboard.contexts == {"submit": None, "abort": None}


async def test_finishing_one_choice_leaves_the_others(connect: Connect) -> None:
    connection, switchboard = await connect(step_time_s=0.002)
    seen: dict[int, list[int]] = {0: [], 1: []}

    async for delta in connection.stream(count_from(1, 60, "two", n=2)):
        seen[delta.choice] += delta.token_ids
        if len(seen[0]) == 5 and ("two", 0) not in switchboard.finishes:
            await connection.finish_choice("two", 0)

    assert seen[1] == list(range(2, 62))
    assert len(seen[0]) < 60
    assert seen[0] == list(range(2, 2 + len(seen[0])))


async def test_finishing_the_last_choice_ends_the_stream(connect: Connect) -> None:
    connection, _ = await connect(step_time_s=0.002)
    stream = connection.stream(count_from(1, 400, "one"))
    await anext(stream)

    await connection.finish_choice("one", 0)

    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_too_many_waiting_is_the_drivers_refusal(connect: Connect) -> None:
    connection, _ = await connect(
        step_time_s=0.002, settings={"max_num_seqs": 1, "max_num_batched_tokens": 8, "max_waiting_requests": 1}
    )
    running = connection.stream(count_from(1, 400, "running"))
    await anext(running)
    waiting = asyncio.create_task(tokens(connection.stream(count_from(1, 5, "waiting"))))
    await asyncio.sleep(0.05)

    with pytest.raises(Overloaded):
        await anext(connection.stream(count_from(1, 5, "refused")))

    await running.aclose()
    assert await waiting == [2, 3, 4, 5, 6]


async def test_a_drivers_death_fails_what_is_open_and_its_successor_is_found(connect: Connect) -> None:
    connection, switchboard = await connect(step_time_s=0.002)
    stream = connection.stream(count_from(1, 400))
    await anext(stream)
    dead = switchboard.driver

    switchboard.lose()
    with pytest.raises(Unavailable, match="gone"):
        await tokens(stream)
    with pytest.raises(Unavailable):
        await anext(connection.stream(count_from(1, 5)))
    cause = connection.unavailable_because
    assert cause is not None

    rig = DriverRig()
    successor = await rig.start()
    switchboard.replace(successor)
    await connection.wait_connected(10)
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
    connection, switchboard = await connect(die_at_step=5, next_deaths=[2, 0, 9], settings={"max_num_seqs": 4})
    assert switchboard.driver is not None
    starts = range(1, 600, 100)
    streams = [tokens(connection.stream(count_from(start, 50, n=1))) for start in starts]
    assert await asyncio.gather(*streams) == [list(range(start + 1, start + 51)) for start in starts]
    assert (await switchboard.driver.stats()).recoveries == 4


async def test_an_expired_lease_fails_what_was_open(connect: Connect) -> None:
    connection, switchboard = await connect(step_time_s=0.002)
    assert switchboard.driver is not None
    stream = connection.stream(count_from(1, 400))
    await anext(stream)

    switchboard.driver._subscriptions._lease_s = -1.0  # the next renewal is already too late
    switchboard.driver._subscriptions.renew(connection._subscriber_id)
    switchboard.driver._subscriptions._lease_s = 3.0

    with pytest.raises(Unavailable, match="lease"):
        await tokens(stream)
    await connection.wait_connected(10)
    assert await tokens(connection.stream(count_from(1, 3, "next"))) == [2, 3, 4]


@pytest.fixture
def quick_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "HEARTBEAT_S", 0.01)
    monkeypatch.setattr(connection_module, "LEASE_S", 0.2)


@pytest.mark.usefixtures("quick_lease")
async def test_a_driver_that_says_nothing_more_fails_what_is_open(connect: Connect) -> None:
    connection, switchboard = await connect(step_time_s=0.002)
    stream = connection.stream(count_from(1, 400))
    await anext(stream)

    switchboard.deaf = switchboard.mute = True

    with pytest.raises(Unavailable, match="has said nothing for"):
        await tokens(stream)
    switchboard.deaf = switchboard.mute = False
    await connection.wait_connected(10)
    assert await tokens(connection.stream(count_from(1, 3, "next"))) == [2, 3, 4]


@pytest.mark.usefixtures("quick_lease")
async def test_what_failed_with_a_silent_driver_does_not_run_on_there(connect: Connect) -> None:
    connection, switchboard = await connect(step_time_s=0.01)
    assert switchboard.driver is not None
    engine = switchboard.driver._engine
    switchboard.driver._subscriptions._lease_s = 0.5
    stream = connection.stream(count_from(1, 480))
    await anext(stream)
    switchboard.deaf = switchboard.mute = True
    with pytest.raises(Unavailable, match="has said nothing for"):
        await tokens(stream)

    switchboard.deaf = switchboard.mute = False
    await connection.wait_connected(10)

    await eventually(lambda: engine.stats().running == 0)
    assert engine.stats().finished[FinishReason.ABORT] == 1


@pytest.mark.usefixtures("quick_lease")
async def test_a_slow_driver_hears_of_every_end_in_the_end(connect: Connect) -> None:
    connection, switchboard = await connect(step_time_s=0.01)
    assert switchboard.driver is not None
    engine = switchboard.driver._engine
    left, stopped = connection.stream(count_from(1, 480, "left")), connection.stream(count_from(1, 480, "stopped"))
    await asyncio.gather(anext(left), anext(stopped))
    switchboard.slow_calls = 3

    await left.aclose()
    await connection.finish_choice("stopped", 0)

    await eventually(lambda: engine.stats().running == 0)
    finished = engine.stats().finished
    assert (finished[FinishReason.ABORT], finished[FinishReason.STOP]) == (1, 1)


@pytest.mark.usefixtures("quick_lease")
async def test_a_driver_that_sends_tokens_is_alive_without_heartbeats(connect: Connect) -> None:
    connection, switchboard = await connect(step_time_s=0.005)
    stream = connection.stream(count_from(1, 200))
    await anext(stream)

    switchboard.deaf = True

    assert (await tokens(stream))[-1] == 201


@pytest.mark.usefixtures("quick_lease")
async def test_a_stall_of_our_own_fails_nothing(connect: Connect) -> None:
    now = [0.0]
    connection, switchboard = await connect(step_time_s=0.002, clock=lambda: now[0])
    stream = connection.stream(count_from(1, 200))
    await anext(stream)
    switchboard.mute = True  # nothing but the heartbeat can end the silence

    for _ in range(5):
        now[0] += 3600.0
        await asyncio.sleep(0.02)

    assert connection.unavailable_because is None
    await stream.aclose()


async def test_nothing_is_taken_after_close(connect: Connect) -> None:
    connection, _ = await connect(step_time_s=0.002)
    stream = connection.stream(count_from(1, 400))
    await anext(stream)

    await connection.close()
    await connection.close()

    with pytest.raises(Unavailable, match="stopping"):
        await tokens(stream)
    with pytest.raises(Unavailable):
        await anext(connection.stream(count_from(1, 5)))


async def test_no_driver_by_the_deadline(connect: Connect) -> None:
    _, switchboard = await connect()
    switchboard.lose()
    lonely = DriverConnection(switchboard)
    lonely.start()
    with pytest.raises(Unavailable, match=r"no driver within 0\.05 s"):
        await lonely.wait_connected(0.05)
    await lonely.close()
