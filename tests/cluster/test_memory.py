"""After 20,000 requests of one token every table of ours is empty again, and no module holds more than before.

In one process over a scripted worker group, through HTTP and from Python. `benchmarks/memory.py` does the same to
processes of a real cluster.
"""

import asyncio
import gc
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster.driver.connection import DriverConnection
from cluster.driver.driver import Driver
from cluster.generation import SamplingParams
from cluster.ingress.app import build_app
from cluster.text.completer import Completer
from tests.cluster.driver.rig import MODEL, DriverRig, eventually, scripted
from tests.cluster.ingress.served import COMPLETIONS, http, no_stats
from tests.fakes.byte_tokenizer import ByteTokenizer
from tests.fakes.scripted_executor import ScriptedExecutor

PROJECT = Path(__file__).resolve().parents[2]
OURS = ("cluster.", "workers.")
WARM_UP = 500  # caches fill, and tables find their size
NUM_REQUESTS = 20_000
NUM_TRACED = 2_000
OVER_HTTP = 20  # one in so many
AT_ONCE = 50


@dataclass
class Application:
    executor: ScriptedExecutor
    driver: Driver
    connection: DriverConnection
    completer: Completer

    def tables(self) -> dict[str, int]:
        """How much is in everything that holds something for a request."""
        engine, subscriptions = self.driver._engine, self.driver._subscriptions
        core, scheduler = engine._core, engine._core.scheduler
        (outbox,) = subscriptions._outboxes.values()
        return {
            "engine: accepted": len(engine._accepted),
            "engine: commands": len(engine._commands) + len(engine._applying),
            "engine: deltas to publish": len(engine._outbox) + engine._publisher._queue.qsize(),
            "core: requests": len(core._requests) + len(core._not_started),
            "scheduler: sequences": len(scheduler.running) + len(scheduler.waiting),
            "scheduler: plans": len(scheduler.in_flight) + len(scheduler._ended),
            "prefix cache: coming": len(scheduler.prefix_cache._coming)
            + len(scheduler.prefix_cache._coming_texts),
            "blocks held": core.pool.num_blocks - core.pool.num_free,
            "rank: mirror": len(self.executor.mirror),
            "driver: owners": subscriptions.num_requests,
            "driver: outbox": len(outbox.open_choices) + len(outbox.pending),
            "ingress: inboxes": len(self.connection._inboxes),
            "ingress: background": len(self.connection._background),
        }

    async def wait_idle(self) -> None:
        await eventually(lambda: not any(self.tables().values()))
        self.driver._engine._core.check_integrity()


@asynccontextmanager
async def application() -> AsyncIterator[Application]:
    executor = scripted(verify=False, keep_executed=False)
    driver = await DriverRig().start(executor)
    connection = DriverConnection(driver)
    connection.start()
    try:
        await connection.wait_connected(60)
        completer = Completer(ByteTokenizer(bos=False), None, connection, MODEL.max_model_len)
        yield Application(executor, driver, connection, completer)
    finally:
        await connection.close()
        await driver.stop()


async def run(numbers: Iterable[int], ask: Callable[[int], Awaitable[None]]) -> None:
    left = iter(numbers)

    async def slot() -> None:
        for number in left:
            await ask(number)

    async with asyncio.TaskGroup() as slots:
        for _ in range(AT_ONCE):
            slots.create_task(slot())


async def run_all(served: Application, start: int, count: int) -> None:
    """Every tenth has two choices; every seventh would go on, but its first token is a stop string."""
    app = build_app(served.completer, "tiny", lambda: None, engine_stats=no_stats, version="1", clock=lambda: 0.0)

    async def ask(number: int) -> None:
        n, stops = 2 if number % 10 == 0 else 1, number % 7 == 0
        sampling = SamplingParams(max_tokens=50 if stops else 1, n=n, stop=("1",) if stops else ())
        request = await served.completer.prepare(f"r{number}", f"request {number:09d}, 0", sampling)
        completion = await served.completer.complete(request)
        assert completion.num_completion_tokens == sampling.n

    async with http(app) as client:

        async def ask_over_http(number: int) -> None:
            body = {"model": "tiny", "prompt": f"request {number:09d}", "max_tokens": 1}
            answer = await client.post(COMPLETIONS, json=body)
            assert answer.status_code == 200

        over_http = count // OVER_HTTP
        await run(range(start, start + over_http), ask_over_http)
    await run(range(start + over_http, start + count), ask)
    await served.wait_idle()


def census() -> Counter[str]:
    """How many objects of ours there are, by type, and how many of all types."""
    gc.collect()
    types = [type(each) for each in gc.get_objects()]
    ours = Counter(f"{one.__module__}.{one.__qualname__}" for one in types if str(one.__module__).startswith(OURS))
    return ours + Counter({"all": len(types)})


def held_memory() -> Counter[str]:
    """Bytes that each of our files has allocated and not freed, and all files together."""
    gc.collect()
    held = Counter(
        {each.traceback[0].filename: each.size for each in tracemalloc.take_snapshot().statistics("filename")}
    )
    ours = Counter({file: size for file, size in held.items() if file.startswith(str(PROJECT / "cluster"))})
    assert ours
    return ours + Counter({"all": held.total()})


@pytest.mark.timeout(300)  # 20 s of one core
async def test_twenty_thousand_requests_leave_nothing_behind() -> None:
    """Objects are counted over all of them, bytes over the last, since telling who holds them is slow."""
    async with application() as served:
        await run_all(served, 0, WARM_UP)
        before = census()
        await run_all(served, WARM_UP, NUM_REQUESTS - NUM_TRACED)
        more_objects = census() - before
        tracemalloc.start()
        try:
            await run_all(served, NUM_REQUESTS, WARM_UP)
            held_before = held_memory()
            await run_all(served, NUM_REQUESTS + WARM_UP, NUM_TRACED)
            more_bytes = held_memory() - held_before
        finally:
            tracemalloc.stop()
        received = (await served.driver.stats()).received

    assert received > NUM_REQUESTS
    assert {name: count for name, count in more_objects.items() if count > NUM_REQUESTS / 20} == {}
    assert {file: size for file, size in more_bytes.items() if size > 50 * NUM_TRACED} == {}, "an object each"
