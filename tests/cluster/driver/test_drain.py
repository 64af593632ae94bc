"""A connection that drains: what runs finishes, what is new is refused, and the deadline holds."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from cluster.driver.connection import DriverConnection
from cluster.driver.driver import Driver
from cluster.errors import Unavailable
from cluster.generation import TokenDelta
from tests.cluster.driver.rig import DriverRig, count_from, scripted


@pytest.fixture
async def connection() -> AsyncIterator[DriverConnection]:
    driver: Driver = await DriverRig().start(scripted(step_time_s=0.002))
    result = DriverConnection(driver)
    result.start()
    await result.wait_connected(5)
    yield result
    await result.close()
    await driver.stop()


async def _tokens(deltas: AsyncIterator[TokenDelta]) -> list[int]:
    return [token async for delta in deltas for token in delta.token_ids]


async def test_what_runs_finishes_and_what_is_new_is_refused(connection: DriverConnection) -> None:
    stream = connection.stream(count_from(1, 100))
    first = await anext(stream)
    rest = asyncio.create_task(_tokens(stream))
    draining = asyncio.create_task(connection.drain(60))
    await asyncio.sleep(0)
    assert connection.unavailable_because == "the service is shutting down"
    with pytest.raises(Unavailable, match="shutting down"):
        await anext(connection.stream(count_from(500, 1)))
    assert await draining is True
    assert [*first.token_ids, *await rest] == list(range(2, 102))


async def test_the_deadline_holds(connection: DriverConnection) -> None:
    stream = connection.stream(count_from(1, 400))
    await anext(stream)
    assert await connection.drain(0.01) is False
    await stream.aclose()  # type: ignore[attr-defined]
    assert await connection.drain(0) is True
