"""The driver's own duties: leases, health, and ending its process when the group cannot go on."""

import asyncio

import pytest

from cluster.driver.delta_codec import Closed, Deltas, decode
from cluster.driver.driver import EXIT_CODE
from cluster.errors import Unavailable
from cluster.generation import FinishReason
from tests.cluster.driver.rig import MODEL, DriverRig, count_from, eventually, scripted


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
    driver = await rig.start(scripted(step_time_s=0.01))
    messages = driver.subscribe("ingress")
    await anext(messages)
    await driver.submit("ingress", count_from(1, 400))
    driver._subscriptions._lease_s = 0.05
    driver._subscriptions.renew("ingress")

    await eventually(lambda: driver._engine.stats().finished.get(FinishReason.ABORT) == 1)

    status = await driver.heartbeat("ingress")
    assert not status.lease
    assert (status.running, status.waiting) == (0, 0)
    assert driver._engine.stats().free_blocks == 256
    await driver.stop()


async def test_heartbeats_keep_a_lease(rig: DriverRig) -> None:
    driver = await rig.start()
    driver._subscriptions._lease_s = 0.8  # more than a stall that is not found to be one
    await anext(driver.subscribe("ingress"))
    for _ in range(30):
        assert (await driver.heartbeat("ingress")).lease
        await asyncio.sleep(0.05)
    await driver.stop()


async def test_a_failed_group_ends_the_process_after_telling_everyone(rig: DriverRig) -> None:
    executor = scripted(die_at_step=3)
    driver = await rig.start(executor, max_recoveries=0)
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


async def test_a_recovery_is_a_pause_and_no_reason_to_be_replaced(rig: DriverRig) -> None:
    executor = scripted(die_at_step=3)
    executor.may_restart.clear()
    driver = await rig.start(executor)
    messages = driver.subscribe("ingress")
    await anext(messages)
    await driver.submit("ingress", count_from(1, 40))
    await eventually(lambda: executor.num_restarts == 1)

    status = await driver.heartbeat("ingress")
    assert status.unavailable_because == "recovering: scripted: a rank died in step 3"
    assert (status.running, status.waiting) == (0, 1)
    await driver.check_health()
    await driver.submit("ingress", count_from(500, 5))
    executor.may_restart.set()

    tokens: dict[str, list[int]] = {}
    async for data in messages:
        message = decode(data)
        assert isinstance(message, Deltas)
        for delta in message.deltas:
            tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
        if not driver._subscriptions.num_requests:
            break
    assert tokens == {"from-1": list(range(2, 42)), "from-500": list(range(501, 506))}
    assert (await driver.heartbeat("ingress")).unavailable_because is None
    await driver.stop()
    assert rig.exits == []


async def test_an_idle_engine_hears_at_once_of_a_death_that_only_the_executor_sees(rig: DriverRig) -> None:
    executor = scripted(die_at_step=0)
    executor.may_restart.clear()
    driver = await rig.start(executor)
    await anext(driver.subscribe("ingress"))

    rig.group_failure = "rank 1 was killed"
    assert (await driver.heartbeat("ingress")).unavailable_because == "rank 1 was killed"
    await eventually(lambda: executor.num_restarts == 1)  # the first heartbeat is two seconds away

    rig.group_failure = None
    assert "recovering" in str((await driver.heartbeat("ingress")).unavailable_because)
    executor.may_restart.set()
    await eventually(lambda: driver.unavailable_because is None)
    await driver.stop()
    assert rig.exits == []


async def test_stopping_ends_the_ranks_and_the_streams(rig: DriverRig) -> None:
    executor = scripted()
    driver = await rig.start(executor)
    messages = driver.subscribe("ingress")
    await anext(messages)

    await driver.stop()
    await driver.stop()

    assert decode(await anext(messages)) == Closed("the driver is shutting down")
    assert executor.stopped
    assert rig.exits == []


async def test_draining_waits_until_every_request_has_ended_and_been_sent(rig: DriverRig) -> None:
    driver = await rig.start(scripted(step_time_s=0.002))
    messages = driver.subscribe("ingress")
    await anext(messages)
    await driver.submit("ingress", count_from(1, 40))

    draining = asyncio.create_task(driver.drain())
    tokens: list[int] = []
    while len(tokens) < 40:
        message = decode(await anext(messages))
        assert isinstance(message, Deltas)
        tokens += [token for delta in message.deltas for token in delta.token_ids]
        assert len(tokens) == 40 or not draining.done()
    await draining
    assert tokens == list(range(2, 42))


async def test_draining_ends_by_its_deadline_and_what_is_open_hears_why(rig: DriverRig) -> None:
    driver = await rig.start(scripted(step_time_s=0.01), drain_deadline_s=0.05)
    messages = driver.subscribe("ingress")
    await anext(messages)
    await driver.submit("ingress", count_from(1, 400))

    await driver.drain()
    await driver.stop()

    *_, last = [decode(data) async for data in messages]
    assert last == Closed("the driver is shutting down")
