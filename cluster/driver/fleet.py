"""An ingress's view of all drivers: a connection to each that runs, and the choice among them.

A driver that Serve is taking away gets nothing new and keeps its connection until its last request has ended.
Lives on one event loop. Knows drivers and how busy they say they are; knows nothing of text, HTTP or Ray.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass

from cluster.driver.connection import DriverConnection
from cluster.driver.handle import Drivers, ReachedDriver
from cluster.driver.status import DriverCard, ServedModel
from cluster.engine.stats import EngineStats
from cluster.errors import ShardserveError, Unavailable
from cluster.generation import GenerationRequest, TokenDelta

logger = logging.getLogger(__name__)

_LOOK_S = 1.0  # between looks for drivers that have come or are going
_LOOK_IN_NEED_S = 0.2  # while there is none
_EXPLAIN_S = 5.0  # between questions why there is none, and for the answer
_DRAIN_POLL_S = 0.05
_STATS_S = 2.0  # for a driver to say what it has counted


@dataclass(slots=True)
class _Member:
    """One driver. `leaving` once Serve sends it no calls any more."""

    card: DriverCard
    driver: ReachedDriver
    connection: DriverConnection
    leaving: bool = False

    @property
    def load(self) -> tuple[bool, int]:
        """To be compared: one that recovers comes last, then the busier one. Ours are counted as they are sent."""
        connection, status = self.connection, self.connection.status
        elsewhere = 0 if status is None else status.running + status.waiting
        return connection.unavailable_because is not None, max(elsewhere, connection.num_requests)

    async def close(self) -> None:
        await self.connection.close()
        await self.driver.close()


class DriverFleet:
    """A `TokenSource` over every driver of the application that serves one model.

    Start it on the loop that will use it; close it when done. `explain` is asked, in a thread, why there is no
    driver; it says None when it does not know.
    """

    def __init__(
        self,
        drivers: Drivers,
        model_name: str,
        clock: Callable[[], float] = time.monotonic,
        *,
        explain: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._drivers = drivers
        self._model_name = model_name
        self._clock = clock
        self._explain = explain
        self._explanation: str | None = None
        self._explained_at = clock()
        self._members: dict[str, _Member] = {}
        self._owners: dict[str, _Member] = {}  # request id -> who has it
        self._model: ServedModel | None = None
        self._search: asyncio.Task[None] | None = None
        self._cause = "the driver is starting"
        self._draining = False

    @property
    def unavailable_because(self) -> str | None:
        """Why no token can be made now; None when one can."""
        if self._draining:
            return self._cause
        causes = [member.connection.unavailable_because for member in self._present()]
        if causes:
            return None if None in causes else causes[0]
        return self._cause if self._explanation is None else f"{self._cause}; {self._explanation}"

    def start(self) -> None:
        self._search = asyncio.create_task(self._keep_looking())

    async def wait_connected(self, deadline_s: float) -> ServedModel:
        """What is served, once a driver is there. Raises `Unavailable` when there is none by the deadline."""
        deadline = self._clock() + deadline_s
        while self._model is None or not self._connected():
            if self._clock() > deadline:
                raise Unavailable(f"no driver within {deadline_s:g} s: {self.unavailable_because}")
            await asyncio.sleep(_DRAIN_POLL_S)
        return self._model

    async def stats(self) -> Mapping[str, EngineStats]:
        """What each driver has counted, by its address. One that does not answer, or drains, is left out."""
        members = self._present()
        answers = await asyncio.gather(*(self._stats_of(member) for member in members))
        return {
            member.card.address: stats for member, stats in zip(members, answers, strict=True) if stats is not None
        }

    async def drain(self, deadline_s: float) -> bool:
        """Refuse what is new. True once nothing runs any more, False when the deadline came first."""
        self._draining = True
        self._cause = "the service is shutting down"
        deadline = self._clock() + deadline_s
        while self._owners and self._clock() < deadline:
            await asyncio.sleep(_DRAIN_POLL_S)
        return not self._owners

    async def close(self) -> None:
        """End all connections; open requests fail. Idempotent."""
        if self._search is not None:
            self._search.cancel()
            await asyncio.gather(self._search, return_exceptions=True)
        members, self._members = list(self._members.values()), {}
        for member in members:
            await member.close()

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[TokenDelta, None]:
        """See `TokenSource.stream`. What one driver loses before its first token is asked of another."""
        tried: set[str] = set()
        while True:
            member = self._choose(tried)
            tried.add(member.card.address)
            started = False
            self._owners[request.request_id] = member
            try:
                async with aclosing(member.connection.stream(request)) as deltas:
                    async for delta in deltas:
                        started = True
                        yield delta
                return
            except Unavailable as error:
                if started or self._draining or not self._connected(tried):
                    raise
                logger.warning("another driver is asked for %s: %s", request.request_id, error)
            finally:
                self._owners.pop(request.request_id, None)

    async def finish_choice(self, request_id: str, choice: int) -> None:
        """See `TokenSource.finish_choice`."""
        member = self._owners.get(request_id)
        if member is not None:
            await member.connection.finish_choice(request_id, choice)

    async def _stats_of(self, member: _Member) -> EngineStats | None:
        with suppress(ShardserveError, TimeoutError):
            async with asyncio.timeout(_STATS_S):
                return await member.driver.stats()
        return None

    def _choose(self, tried: set[str]) -> _Member:
        """The least busy driver. Raises `Unavailable` when there is none."""
        if self._draining:
            raise Unavailable(self._cause)
        members = self._connected(tried)
        if not members:
            raise Unavailable(self.unavailable_because or self._cause)
        return min(members, key=lambda member: member.load)

    def _present(self) -> list[_Member]:
        return [member for member in self._members.values() if not member.leaving]

    def _connected(self, tried: Collection[str] = ()) -> list[_Member]:
        return [
            member
            for member in self._present()
            if member.connection.is_connected and member.card.address not in tried
        ]

    async def _keep_looking(self) -> None:
        while True:
            with suppress(ShardserveError):  # it cannot be said now
                await self._look()
            with suppress(TimeoutError):
                await self._ask_why_there_is_none()
            await asyncio.sleep(_LOOK_S if self._connected() else _LOOK_IN_NEED_S)

    async def _look(self) -> None:
        found = {card.address: card for card in await self._drivers.find()}
        for address, card in found.items():
            if address not in self._members and self._serves_our_model(card.model):
                self._model = self._model or card.model
                driver = self._drivers.reach(card)
                self._members[address] = _Member(card, driver, DriverConnection(driver, self._clock))
                self._members[address].connection.start()
        for address, member in list(self._members.items()):
            member.leaving = address not in found
            if member.leaving and not (member.connection.is_connected and member.connection.num_requests):
                del self._members[address]
                self._cause = member.connection.unavailable_because or "the driver is being replaced"
                await member.close()

    async def _ask_why_there_is_none(self) -> None:
        if self._members:
            self._explanation = None
        elif self._clock() - self._explained_at > _EXPLAIN_S:
            self._explained_at = self._clock()
            async with asyncio.timeout(_EXPLAIN_S):
                self._explanation = await asyncio.to_thread(self._explain)

    def _serves_our_model(self, model: ServedModel) -> bool:
        """While an application is replaced, drivers of the old and of the new one may both be there."""
        if model.name != self._model_name:
            return False
        ours = self._model
        return ours is None or (model.vocab_size, model.eos_token_ids) == (ours.vocab_size, ours.eos_token_ids)
