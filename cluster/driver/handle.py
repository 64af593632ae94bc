"""Drivers as an ingress sees them, and that view over a Serve handle with Ray's errors turned into ours.

Knows which call goes which way and which errors mean "gone"; knows nothing of engines, text or HTTP.
"""

import asyncio
import contextvars
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol

from ray import serve
from ray.exceptions import (
    NodeDiedError,
    ObjectLostError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException

from cluster.driver.lifeline import Lifeline
from cluster.driver.status import DriverCard, DriverStatus
from cluster.engine.stats import EngineStats
from cluster.errors import GenerationFailed, ShardserveError, Unavailable
from cluster.generation import GenerationRequest

_FIND_S = 3.0  # for all drivers to introduce themselves

# Where a call was, or its answer, is no longer there: another try may find a successor.
_GONE = (RayActorError, RayServeException, WorkerCrashedError, NodeDiedError, ObjectLostError)


class DriverHandle(Protocol):
    """One driver, as an ingress calls it. `cluster.driver.driver.Driver` is one, in its own process."""

    def subscribe(self, subscriber_id: str) -> AsyncIterator[bytes]: ...

    async def submit(self, subscriber_id: str, request: GenerationRequest) -> None: ...

    async def abort(self, request_id: str) -> None: ...

    async def finish_choice(self, request_id: str, choice: int) -> None: ...

    async def heartbeat(self, subscriber_id: str) -> DriverStatus: ...


class ReachedDriver(DriverHandle, Protocol):
    """One of several, reached across the cluster."""

    async def stats(self) -> EngineStats:
        """What its engine has counted."""
        ...

    async def close(self) -> None:
        """Let go of what reaches it. Idempotent."""
        ...


class Drivers(Protocol):
    """All drivers of an application."""

    async def find(self) -> Sequence[DriverCard]:
        """Those that take new requests now. Raises `Unavailable` when that cannot be said."""
        ...

    def reach(self, card: DriverCard) -> ReachedDriver: ...


def app_handle(application: str) -> Any:
    """A handle of that application's ingress, for any thread. Raises `RayServeException` when there is none.

    Left to itself, Serve makes handles under RAY_SERVE_THROUGHPUT_OPTIMIZED that only an event loop can use.
    """
    handle: Any = serve.get_app_handle(application)
    if not handle.is_initialized:
        handle._init(_run_router_in_separate_loop=True)
    return handle


class ServeDrivers:
    """The drivers behind one Serve handle, whose deployment is routed by `cluster.driver.routing.ByAddress`."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def find(self) -> Sequence[DriverCard]:
        """See `Drivers`. A driver that hangs hides the others for as long as Serve does not know it."""
        try:
            answers = await self._handle.broadcast("introduce").results_async(
                timeout_s=_FIND_S, return_exceptions=True
            )
        except DeploymentUnavailableError:  # none runs
            return []
        except (RayError, RayServeException) as error:
            raise as_ours(error) from None
        except TimeoutError:
            raise Unavailable(f"the drivers did not answer within {_FIND_S:g} s") from None
        return [answer for answer in answers if isinstance(answer, DriverCard)]

    def reach(self, card: DriverCard) -> ReachedDriver:
        return AddressedDriver(self._handle, card)


class AddressedDriver:
    """One replica across the cluster. All calls raise `Unavailable` when it is gone.

    New requests and questions go through Serve, which knows who may be asked; the rest over its lifeline.
    """

    def __init__(self, handle: Any, card: DriverCard) -> None:
        self._calls = handle.options(session_id=card.address)
        self._lifeline = Lifeline(card.lifeline)

    def subscribe(self, subscriber_id: str) -> AsyncIterator[bytes]:
        return self._lifeline.subscribe(subscriber_id)

    async def submit(self, subscriber_id: str, request: GenerationRequest) -> None:
        try:
            refusal: ShardserveError | None = await _apart(self._calls.offer.remote, subscriber_id, request)
        except (RayError, RayServeException) as error:
            raise as_ours(error) from None
        if refusal is not None:
            raise refusal

    async def abort(self, request_id: str) -> None:
        await self._lifeline.abort(request_id)

    async def finish_choice(self, request_id: str, choice: int) -> None:
        await self._lifeline.finish_choice(request_id, choice)

    async def heartbeat(self, subscriber_id: str) -> DriverStatus:
        return await self._lifeline.heartbeat(subscriber_id)

    async def stats(self) -> EngineStats:
        try:
            stats: EngineStats = await _apart(self._calls.stats.remote)
        except (RayError, RayServeException) as error:
            raise as_ours(error) from None
        return stats

    async def close(self) -> None:
        await self._lifeline.close()


async def _apart(call: Callable[..., Any], *arguments: object) -> Any:
    """The answer to a call that carries nothing of the HTTP request it is made for.

    Serve gives a call the id of the request that its context names, and tells pending calls apart by that id: of
    two at once for one request, each to its own replica, one is routed to the other's.
    """

    async def answer() -> Any:
        return await call(*arguments)

    return await asyncio.create_task(answer(), context=contextvars.Context())


def as_ours(error: Exception) -> ShardserveError:
    """What a failed call means to whoever made it: the far end raised an error of ours, or it is gone."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, ShardserveError):
            return cause
        if isinstance(cause, _GONE):
            return as_ours(cause)
        return GenerationFailed(f"{type(cause).__name__}: {cause}")
    if isinstance(error, _GONE):
        return Unavailable(f"the replica is gone or going: {_first_line(error)}", retry_after_s=5.0)
    return GenerationFailed(f"{type(error).__name__}: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]
