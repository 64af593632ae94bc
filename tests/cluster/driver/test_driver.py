"""The driver's own duties: leases, health, and ending its process when the group cannot go on."""

import asyncio

import pytest

from cluster.driver.delta_codec import Closed, decode
from cluster.driver.driver import EXIT_CODE
from cluster.errors import Unavailable
from cluster.generation import FinishReason
from tests.cluster.driver.rig import MODEL, DriverRig, count_from, scripted
from tests.cluster.driver.test_connection import eventually


@pytest.fixture
def rig() -> DriverRig:
    return DriverRig()


async def test_it_describes_what_it_serves(rig: DriverRig) -> None:
    driver = await rig.start()
    assert await driver.describe() == MODEL
    await driver.check_health()
    await driver.stop()


async def test_a_request_needs_a_subscription(rig: DriverRig) -> None:
    driver = await rig.start()
    with pytest.raises(Unavailable, match="does not know this ingress"):
        await driver.submit("stranger", count_from(1, 5))
    await driver.stop()


async def test_a_refused_request_leaves_nothing_behind(rig: DriverRig) -> None:
    driver = await rig.start()
    await anext(driver.subscribe("ingress"))
    await driver.submit("ingress", count_from(1, 5, "twice"))
    await driver.abort("twice")
    await driver.stop()
    with pytest.raises(Unavailable):
        await driver.submit("ingress", count_from(1, 5, "late"))
    assert driver._subscriptions.num_requests == 0


async def test_requests_of_an_ingress_that_vanished_are_freed(rig: DriverRig) -> None:
    driver = await rig.start(scripted(step_time_s=0.002))
    driver._subscriptions._lease_s = 0.05
    messages = driver.subscribe("ingress")
    await anext(messages)
    await driver.submit("ingress", count_from(1, 400))

    await eventually(lambda: driver._engine.stats().finished.get(FinishReason.ABORT) == 1)

    status = await driver.heartbeat("ingress")
    assert not status.lease
    assert (status.running, status.waiting) == (0, 0)
    assert driver._engine.stats().free_blocks == 256
    await driver.stop()


async def test_heartbeats_keep_a_lease(rig: DriverRig) -> None:
    driver = await rig.start()
    driver._subscriptions._lease_s = 0.3
    await anext(driver.subscribe("ingress"))
    for _ in range(20):
        assert (await driver.heartbeat("ingress")).lease
        await asyncio.sleep(0.05)
    await driver.stop()


async def test_a_failed_group_ends_the_process_after_telling_everyone(rig: DriverRig) -> None:
    executor = scripted(die_at_step=3)
    driver = await rig.start(executor)
    messages = driver.subscribe("ingress")
    await anext(messages)
    await driver.submit("ingress", count_from(1, 100))

    last = [decode(data) async for data in messages][-1]

    assert isinstance(last, Closed)
    assert "a rank died in step 3" in str(last.error)
    with pytest.raises(Unavailable, match="a rank died"):
        await driver.check_health()
    await eventually(lambda: rig.exits == [EXIT_CODE])
    assert executor.stopped


async def test_a_death_that_only_the_executor_sees_ends_the_process_too(rig: DriverRig) -> None:
    driver = await rig.start()
    await anext(driver.subscribe("ingress"))

    rig.group_failure = "rank 1 was killed"

    await eventually(lambda: rig.exits == [EXIT_CODE])
    with pytest.raises(Unavailable, match="rank 1 was killed"):
        await driver.submit("ingress", count_from(1, 5))


async def test_stopping_ends_the_ranks_and_the_streams(rig: DriverRig) -> None:
    executor = scripted()
    driver = await rig.start(executor)
    messages = driver.subscribe("ingress")
    await anext(messages)

    await driver.stop()
    await driver.stop()

    assert decode(await anext(messages)) == Closed(None)
    assert executor.stopped
    assert rig.exits == []
