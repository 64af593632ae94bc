"""A driver of this process, reached as if across the cluster: it may be gone, slow, silent or unwilling."""

import asyncio
from collections.abc import AsyncIterator
from contextvars import ContextVar

from cluster.driver.driver import Driver
from cluster.driver.status import DriverStatus
from cluster.engine.stats import EngineStats
from cluster.errors import Unavailable
from cluster.generation import GenerationRequest

SERVE_REQUEST: ContextVar[str | None] = ContextVar("SERVE_REQUEST", default=None)


class FarDriver:
    """A `ReachedDriver`. It can lose its driver and be given another, as a Serve handle can."""

    def __init__(self, driver: Driver) -> None:
        self.driver: Driver | None = driver
        self.lost = asyncio.Event()
        self.deaf = False  # heartbeats and questions get no answer
        self.mute = False  # messages do not arrive
        self.refuses = False  # what is submitted
        self.slow_calls = 0  # so many calls to end something get no answer
        self.answer: asyncio.Future[None] | None = None  # of a submission, when it is to be held back
        self.num_submitted = 0  # that it took
        self.aborts: list[str] = []
        self.finishes: list[tuple[str, int]] = []
        self.contexts: dict[str, str | None] = {}
        self.is_closed = False

    def lose(self) -> None:
        self.driver = None
        self.lost.set()

    def replace(self, driver: Driver) -> None:
        self.driver = driver
        self.lost = asyncio.Event()

    async def subscribe(self, subscriber_id: str) -> AsyncIterator[bytes]:
        messages = self._here().subscribe(subscriber_id)
        lost = asyncio.ensure_future(self.lost.wait())
        try:
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
        finally:
            lost.cancel()

    async def submit(self, subscriber_id: str, request: GenerationRequest) -> None:
        if self.refuses:
            raise Unavailable("driver is gone or going")
        self.contexts["submit"] = SERVE_REQUEST.get()
        await self._here().submit(subscriber_id, request)
        self.num_submitted += 1
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

    async def stats(self) -> EngineStats:
        if self.deaf:
            await asyncio.sleep(60)
        return await self._here().stats()

    async def close(self) -> None:
        self.is_closed = True

    def _answer_late(self) -> None:
        if self.slow_calls:
            self.slow_calls -= 1
            raise Unavailable("the driver did not answer within 5 s")

    def _here(self) -> Driver:
        if self.driver is None:
            raise Unavailable("the replica is gone")
        return self.driver
