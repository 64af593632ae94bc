"""The line beside Serve: heartbeats and aborts, over a real socket."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from cluster.driver import lifeline as lifeline_module
from cluster.driver.lifeline import Lifeline, LifelineServer
from cluster.driver.status import DriverStatus, LifelineAddress
from cluster.errors import Unavailable

STATUS = DriverStatus(lease=True, running=3, waiting=4, unavailable_because="recovering: rank 1 died")


class Driver:
    def __init__(self) -> None:
        self.aborted: list[str] = []
        self.finished: list[tuple[str, int]] = []
        self.beats: list[str] = []
        self.lost: list[str] = []
        self.hangs = False
        self.subscribers: list[str] = []
        self.messages: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.num_taken = 0

    async def subscribe(self, subscriber_id: str) -> AsyncIterator[bytes]:
        self.subscribers.append(subscriber_id)
        while (message := await self.messages.get()) is not None:
            self.num_taken += 1
            yield message

    async def heartbeat(self, subscriber_id: str) -> DriverStatus:
        self.beats.append(subscriber_id)
        if self.hangs:
            await asyncio.sleep(60)
        return STATUS

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    async def finish_choice(self, request_id: str, choice: int) -> None:
        self.finished.append((request_id, choice))

    def line_lost(self, subscriber_id: str) -> None:
        self.lost.append(subscriber_id)


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
async def server(driver: Driver) -> AsyncIterator[LifelineServer]:
    server = LifelineServer(driver)
    yield server
    await server.close()


@pytest.fixture
async def address(server: LifelineServer) -> LifelineAddress:
    return await server.open("127.0.0.1")


@pytest.fixture
async def line(address: LifelineAddress) -> AsyncIterator[Lifeline]:
    line = Lifeline(address)
    yield line
    await line.close()


async def test_calls_and_answers(driver: Driver, line: Lifeline) -> None:
    calls = [line.heartbeat("me"), line.abort("one"), line.heartbeat("me"), line.finish_choice("two", 3)]
    answers = await asyncio.gather(*calls)
    assert [answers[0], answers[2]] == [STATUS, STATUS]
    assert driver.beats == ["me", "me"]
    assert driver.aborted == ["one"]
    assert driver.finished == [("two", 3)]


async def test_a_line_without_the_secret_is_not_served(driver: Driver, address: LifelineAddress) -> None:
    stranger = Lifeline(replace(address, token="guessed"))
    with pytest.raises(Unavailable, match="cannot be reached"):
        await stranger.heartbeat("me")
    await stranger.close()
    assert driver.beats == []


async def test_nobody_there(address: LifelineAddress, server: LifelineServer) -> None:
    await server.close()
    with pytest.raises(Unavailable, match="cannot be reached"):
        await Lifeline(address).heartbeat("me")


async def test_the_end_of_a_line_tells_whose_it_was(
    driver: Driver, line: Lifeline, address: LifelineAddress
) -> None:
    other = Lifeline(address)
    await asyncio.gather(line.heartbeat("me"), other.heartbeat("other"), line.abort("one"))
    await line.close()
    async with asyncio.timeout(60):
        while not driver.lost:
            await asyncio.sleep(0.001)
    assert driver.lost == ["me"]
    assert await other.heartbeat("other") == STATUS
    await other.close()


async def test_a_broken_line_is_opened_anew(line: Lifeline, server: LifelineServer) -> None:
    await line.heartbeat("me")
    for task in server._lines:
        task.cancel()
    with pytest.raises(Unavailable):
        await line.heartbeat("me")
    assert await line.heartbeat("me") == STATUS


async def test_an_answer_that_does_not_come_ends_by_its_deadline(
    driver: Driver, line: Lifeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.hangs = True
    with monkeypatch.context() as patch:
        patch.setattr(lifeline_module, "_ANSWER_S", 0.05)
        with pytest.raises(Unavailable, match="did not answer"):
            await line.heartbeat("me")
    driver.hangs = False
    assert await line.heartbeat("me") == STATUS


async def test_a_call_given_up_does_not_leave_its_answer_to_the_next(driver: Driver, line: Lifeline) -> None:
    driver.hangs = True
    call = asyncio.create_task(line.heartbeat("me"))
    while not driver.beats:
        await asyncio.sleep(0.001)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    driver.hangs = False
    await line.abort("one")
    assert await line.heartbeat("me") == STATUS
    assert driver.aborted == ["one"]


async def test_a_subscription_carries_messages_of_any_size_beside_the_calls(
    driver: Driver, line: Lifeline
) -> None:
    sent = [b"x", b"y" * 3_000_000, bytes(range(256))]
    for message in (*sent, None):
        driver.messages.put_nowait(message)
    found = []
    async for message in line.subscribe("me"):
        found.append(message)
        assert await line.heartbeat("me") == STATUS
    assert found == sent
    assert driver.subscribers == ["me"]


async def test_a_slow_reader_is_not_sent_everything(driver: Driver, line: Lifeline) -> None:
    for _ in range(100):
        driver.messages.put_nowait(bytes(2**20))
    subscription = line.subscribe("me")
    await anext(subscription)
    await asyncio.sleep(0.2)
    assert driver.num_taken < 100
    await subscription.aclose()


async def test_a_subscription_that_breaks_off_is_a_driver_that_is_gone(
    driver: Driver, line: Lifeline, server: LifelineServer
) -> None:
    driver.messages.put_nowait(b"first")
    subscription = line.subscribe("me")
    assert await anext(subscription) == b"first"
    waiting = asyncio.create_task(anext(subscription))
    await server.close()
    with pytest.raises(Unavailable, match="the driver is gone") as caught:
        await waiting
    assert caught.value.retry_after_s > 0


async def test_nobody_to_subscribe_to(address: LifelineAddress, server: LifelineServer) -> None:
    await server.close()
    with pytest.raises(Unavailable, match="the driver is gone"):
        await anext(Lifeline(address).subscribe("me"))


async def test_whoever_leaves_a_subscription_closes_its_line(
    driver: Driver, line: Lifeline, server: LifelineServer
) -> None:
    driver.messages.put_nowait(b"first")
    subscription = line.subscribe("me")
    await anext(subscription)
    await subscription.aclose()
    async with asyncio.timeout(60):
        while server._lines:
            driver.messages.put_nowait(b"more")
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("nonsense", [b"\n", b"{}\n", b'["no such call","x"]\n', b"[1,2,3,4,5]\n"])
async def test_nonsense_ends_the_line_and_nothing_else(
    address: LifelineAddress, line: Lifeline, nonsense: bytes
) -> None:
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(address.token.encode() + b"\n" + nonsense)
    assert await reader.read() == b""
    writer.close()
    assert await line.heartbeat("me") == STATUS
