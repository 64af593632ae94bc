"""After 20,000 requests of one token every table of ours is empty again, and no module holds more than before.

In one process over a scripted worker group, through HTTP and from Python. `benchmarks/memory.py` does the same to
processes of a real cluster.
"""

import asyncio
import gc
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from cluster.driver.connection import DriverConnection
from cluster.driver.driver import Driver
from cluster.generation import SamplingParams
from cluster.ingress.app import build_app
from cluster.text.completer import Completer
from tests.cluster.driver.rig import MODEL, DriverRig, scripted
from tests.cluster.driver.test_connection import eventually
from tests.cluster.ingress.served import COMPLETIONS, http, no_stats
from tests.fakes.byte_tokenizer import ByteTokenizer
from tests.fakes.scripted_executor import ScriptedExecutor

PROJECT = Path(__file__).resolve().parents[2]
WARM_UP = 3_000  # caches fill, and tables find their size
NUM_REQUESTS = 20_000
NUM_HTTP_REQUESTS = 1_000  # of these
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
        await connection.wait_connected(5)
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

        over_http = count * NUM_HTTP_REQUESTS // NUM_REQUESTS
        await run(range(start, start + over_http), ask_over_http)
    await run(range(start + over_http, start + count), ask)
    await served.wait_idle()


def held_memory() -> dict[str, int]:
    """Bytes that each file has allocated and not freed."""
    gc.collect()
    statistics = tracemalloc.take_snapshot().statistics("filename")
    return {statistic.traceback[0].filename: statistic.size for statistic in statistics}


async def test_twenty_thousand_requests_leave_nothing_behind() -> None:
    tracemalloc.start()
    try:
        async with application() as served:
            await run_all(served, 0, WARM_UP)
            before = held_memory()
            await run_all(served, WARM_UP, NUM_REQUESTS)
            after = held_memory()
            received = (await served.driver.stats()).received
    finally:
        tracemalloc.stop()

    assert received > WARM_UP + NUM_REQUESTS
    grown = {file: size - before.get(file, 0) for file, size in after.items()}
    ours = {file: size for file, size in grown.items() if file.startswith(str(PROJECT / "cluster"))}
    assert ours
    assert {file: size for file, size in ours.items() if size > NUM_REQUESTS} == {}, "a byte a request"
    assert sum(grown.values()) < 20 * NUM_REQUESTS, "what libraries hold for us counts as well"
