"""A driver as an ingress sees it, and that view over a Serve handle with Ray's errors turned into ours.

Knows which call is streamed and which errors mean "gone"; knows nothing of engines, text or HTTP.
"""

from collections.abc import AsyncIterator
from typing import Any, Protocol

from ray.exceptions import (
    NodeDiedError,
    ObjectLostError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)
from ray.serve.exceptions import RayServeException

from cluster.driver.status import DriverStatus, ServedModel
from cluster.errors import GenerationFailed, ShardserveError, Unavailable
from cluster.generation import GenerationRequest

# Where a call was, or its answer, is no longer there: another try may find a successor.
_GONE = (RayActorError, RayServeException, WorkerCrashedError, NodeDiedError, ObjectLostError)


class DriverHandle(Protocol):
    """The calls an ingress makes. `cluster.driver.driver.Driver` is one, in its own process."""

    def subscribe(self, subscriber_id: str) -> AsyncIterator[bytes]: ...

    async def submit(self, subscriber_id: str, request: GenerationRequest) -> None: ...

    async def abort(self, request_id: str, choice: int | None = None) -> None: ...

    async def heartbeat(self, subscriber_id: str) -> DriverStatus: ...

    async def describe(self) -> ServedModel: ...


class ServeDriverHandle:
    """The same calls across the cluster. All raise `Unavailable` when the replica behind the handle is gone."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._streaming = handle.options(stream=True)

    async def subscribe(self, subscriber_id: str) -> AsyncIterator[bytes]:
        messages = self._streaming.subscribe.remote(subscriber_id)
        try:
            async for message in messages:
                yield message
        except (RayError, RayServeException) as error:
            raise as_ours(error) from None
        finally:
            messages.cancel()

    async def submit(self, subscriber_id: str, request: GenerationRequest) -> None:
        await self._call(self._handle.submit, subscriber_id, request)

    async def abort(self, request_id: str, choice: int | None = None) -> None:
        await self._call(self._handle.abort, request_id, choice)

    async def heartbeat(self, subscriber_id: str) -> DriverStatus:
        status: DriverStatus = await self._call(self._handle.heartbeat, subscriber_id)
        return status

    async def describe(self) -> ServedModel:
        model: ServedModel = await self._call(self._handle.describe)
        return model

    async def _call(self, method: Any, *args: object) -> Any:
        try:
            return await method.remote(*args)
        except (RayError, RayServeException) as error:
            raise as_ours(error) from None


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
