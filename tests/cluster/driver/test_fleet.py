"""Several drivers behind one ingress: found, chosen, lost, taken away, drained."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace

import pytest

from cluster.driver.driver import Driver
from cluster.driver.fleet import DriverFleet
from cluster.driver.status import DriverCard, LifelineAddress
from cluster.errors import Unavailable
from cluster.generation import FinishReason
from tests.cluster.driver.far_driver import FarDriver
from tests.cluster.driver.rig import MODEL, DriverRig, count_from, eventually, scripted, tokens

NOWHERE = LifelineAddress("127.0.0.1", 1, "secret")


class Some:
    """The drivers that run: put some in, take some out."""

    def __init__(self) -> None:
        self.reached: dict[str, FarDriver] = {}
        self.running: dict[str, DriverCard] = {}
        self.hides = False

    def add(self, address: str, driver: Driver, **other: object) -> FarDriver:
        self.running[address] = DriverCard(address, replace(MODEL, **other), NOWHERE)  # type: ignore[arg-type]
        self.reached[address] = FarDriver(driver)
        return self.reached[address]

    async def find(self) -> Sequence[DriverCard]:
        if self.hides:
            raise Unavailable("the drivers did not answer")
        return list(self.running.values())

    def reach(self, card: DriverCard) -> FarDriver:
        return self.reached[card.address]


Start = Callable[..., Awaitable[Driver]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    rig = DriverRig()
    started: list[Driver] = []

    async def start(**options: object) -> Driver:
        driver = await rig.start(scripted(**{"step_time_s": 0.002, **options}))
        started.append(driver)
        return driver

    yield start
    for driver in started:
        await driver.stop()


@pytest.fixture
async def some(monkeypatch: pytest.MonkeyPatch) -> Some:
    monkeypatch.setattr("cluster.driver.fleet._LOOK_S", 0.01)
    monkeypatch.setattr("cluster.driver.fleet._LOOK_IN_NEED_S", 0.01)
    return Some()


@pytest.fixture
async def fleet(some: Some) -> AsyncIterator[DriverFleet]:
    fleet = DriverFleet(some, MODEL.name)
    fleet.start()
    yield fleet
    await fleet.close()


async def connected(fleet: DriverFleet, count: int) -> None:
    await eventually(lambda: len(fleet._connected()) == count)


async def test_requests_are_spread_and_all_exact(start: Start, some: Some, fleet: DriverFleet) -> None:
    a, b = some.add("a", await start()), some.add("b", await start())
    assert await fleet.wait_connected(60) == MODEL
    await connected(fleet, 2)

    answers = await asyncio.gather(*(tokens(fleet.stream(count_from(10 * i, 30))) for i in range(8)))

    assert answers == [list(range(10 * i + 1, 10 * i + 31)) for i in range(8)]
    assert (a.num_submitted, b.num_submitted) == (4, 4)


async def test_without_a_driver_it_says_so(fleet: DriverFleet) -> None:
    assert fleet.unavailable_because == "the driver is starting"
    with pytest.raises(Unavailable, match=r"no driver within 0\.1 s: the driver is starting"):
        await fleet.wait_connected(0.1)
    with pytest.raises(Unavailable, match="the driver is starting"):
        await anext(fleet.stream(count_from(1, 5)))


async def test_drivers_of_another_model_are_left_alone(start: Start, some: Some, fleet: DriverFleet) -> None:
    some.add("other name", await start(), name="another")
    some.add("ours", await start())
    await connected(fleet, 1)
    some.add("other vocabulary", await start(), vocab_size=7)
    await asyncio.sleep(0.05)
    assert [member.card.address for member in fleet._connected()] == ["ours"]


async def test_one_that_is_taken_away_finishes_what_it_has(start: Start, some: Some, fleet: DriverFleet) -> None:
    old = some.add("old", await start())
    await connected(fleet, 1)
    stream = fleet.stream(count_from(1, 300))
    first = await anext(stream)
    rest = asyncio.create_task(tokens(stream))

    new = some.add("new", await start())
    del some.running["old"]
    await eventually(lambda: [member.card.address for member in fleet._connected()] == ["new"])
    assert await tokens(fleet.stream(count_from(500, 5))) == [501, 502, 503, 504, 505]
    assert fleet.unavailable_because is None

    assert [*first.token_ids, *await rest] == list(range(2, 302))
    assert (old.num_submitted, new.num_submitted) == (1, 1)
    await eventually(lambda: old.is_closed)
    assert not new.is_closed


async def test_a_driver_that_just_went_is_no_failure_while_there_is_another(
    start: Start, some: Some, fleet: DriverFleet
) -> None:
    gone, other = some.add("gone", await start()), some.add("other", await start())
    await connected(fleet, 2)
    gone.refuses = True
    answers = await asyncio.gather(*(tokens(fleet.stream(count_from(10 * i, 20))) for i in range(4)))
    assert answers == [list(range(10 * i + 1, 10 * i + 21)) for i in range(4)]
    assert other.num_submitted == 4


async def test_a_death_after_the_first_token_is_an_error(start: Start, some: Some, fleet: DriverFleet) -> None:
    dying = some.add("dying", await start(step_time_s=0.02))
    await connected(fleet, 1)
    stream = fleet.stream(count_from(1, 400))
    await anext(stream)
    some.add("other", await start())
    await connected(fleet, 2)
    dying.lose()
    with pytest.raises(Unavailable, match="gone"):
        await tokens(stream)


async def test_when_it_cannot_be_said_who_runs_nothing_changes(
    start: Start, some: Some, fleet: DriverFleet
) -> None:
    reached = some.add("a", await start())
    await connected(fleet, 1)
    some.hides = True
    some.running.clear()
    await asyncio.sleep(0.05)
    assert await tokens(fleet.stream(count_from(1, 3))) == [2, 3, 4]
    assert not reached.is_closed


async def test_a_stop_string_ends_the_choice_where_it_runs(start: Start, some: Some, fleet: DriverFleet) -> None:
    driver = await start(step_time_s=0.02)
    some.add("a", driver)
    await connected(fleet, 1)
    stream = fleet.stream(count_from(1, 400, "stopped"))
    await anext(stream)
    await fleet.finish_choice("stopped", 0)
    await tokens(stream)
    await eventually(lambda: driver._engine.stats().finished.get(FinishReason.STOP) == 1)


async def test_draining_finishes_what_runs_and_refuses_what_is_new(
    start: Start, some: Some, fleet: DriverFleet
) -> None:
    some.add("a", await start())
    await connected(fleet, 1)
    stream = fleet.stream(count_from(1, 100))
    first = await anext(stream)
    rest = asyncio.create_task(tokens(stream))
    draining = asyncio.create_task(fleet.drain(60))
    await asyncio.sleep(0)
    assert fleet.unavailable_because == "the service is shutting down"
    with pytest.raises(Unavailable, match="shutting down"):
        await anext(fleet.stream(count_from(500, 1)))
    assert await draining is True
    assert [*first.token_ids, *await rest] == list(range(2, 102))


async def test_draining_ends_by_its_deadline(start: Start, some: Some, fleet: DriverFleet) -> None:
    some.add("a", await start(step_time_s=0.02))
    await connected(fleet, 1)
    stream = fleet.stream(count_from(1, 400))
    await anext(stream)
    assert await fleet.drain(0.01) is False
    await fleet.close()
    with pytest.raises(Unavailable, match="stopping"):
        await tokens(stream)
    assert await fleet.drain(0) is True


async def test_it_asks_why_there_is_no_driver(start: Start, some: Some, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.driver.fleet._EXPLAIN_S", 0.01)
    fleet = DriverFleet(some, MODEL.name, explain=lambda: "2 bundles of 64 CPU wanted")
    fleet.start()
    await eventually(lambda: fleet.unavailable_because == "the driver is starting; 2 bundles of 64 CPU wanted")
    some.add("a", await start())
    await eventually(lambda: fleet.unavailable_because is None)
    await fleet.close()


async def test_each_driver_that_answers_says_what_it_has_counted(
    some: Some, start: Start, fleet: DriverFleet
) -> None:
    reached = [some.add(address, await start()) for address in ("a", "b", "c")]
    await fleet.wait_connected(60)
    await eventually(lambda: len(fleet._present()) == 3)
    assert len(await tokens(fleet.stream(count_from(1, 5)))) == 5
    assert sum(stats.received for stats in (await fleet.stats()).values()) == 1

    reached[0].lose()
    reached[1].deaf = True
    assert set(await fleet.stats()) == {"c"}
