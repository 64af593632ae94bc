"""`Client` over a handle that answers as Serve's do: what is returned, cancelled and raised."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError
from ray.serve.exceptions import RayServeException

from cluster.client import AsyncClient, Client
from cluster.errors import (
    DeadlineExceeded,
    GenerationFailed,
    InvalidConfig,
    InvalidRequest,
    Overloaded,
    ShardserveError,
    Unavailable,
)
from cluster.generation import Completion, RequestOptions, SamplingParams, TextDelta

COMPLETION = Completion("id", (1,))
HANGS = object()  # in place of an answer


class Response:
    """A `DeploymentResponse` or `DeploymentResponseGenerator`, as far as the clients use one."""

    def __init__(self, items: list[Any]) -> None:
        self._items = items
        self._cancelled = threading.Event()

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def result(self, timeout_s: float) -> Any:
        if self._items[0] is HANGS:
            raise TimeoutError("Timed out resolving to ObjectRef.")
        return next(iter(self))

    def __await__(self) -> Iterator[Any]:
        return anext(aiter(self)).__await__()  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            if item is HANGS:
                assert self._cancelled.wait(timeout=60)
                raise RayServeException("cancelled")
            if isinstance(item, Exception):
                raise item
            yield item

    async def __aiter__(self) -> Any:
        for item in self._items:
            if item is HANGS:
                await asyncio.Event().wait()
            if isinstance(item, Exception):
                raise item
            yield item

    def cancel(self) -> None:
        self._cancelled.set()


class Handle:
    """Every method of it answers with the same response."""

    def __init__(self, *items: Any) -> None:
        self.response = Response(list(items))
        self.arguments: tuple[Any, ...] = ()

    def options(self, **_: object) -> "Handle":
        return self

    def __getattr__(self, name: str) -> "Handle":
        return self

    def remote(self, *arguments: Any) -> Response:
        self.arguments = arguments
        return self.response


def raised_by_user_code(cause: Exception) -> Exception:
    error: Exception = RayTaskError("generate", "traceback", cause).as_instanceof_cause()
    return error


@pytest.mark.parametrize(
    ("error", "ours"),
    [
        (raised_by_user_code(InvalidRequest("prompt is empty", "prompt")), InvalidRequest),
        (raised_by_user_code(Overloaded("full", 7.0)), Overloaded),
        (raised_by_user_code(ZeroDivisionError("oops")), GenerationFailed),
        (raised_by_user_code(ActorDiedError()), Unavailable),
        (ActorDiedError(), Unavailable),
        (RayServeException("no replica"), Unavailable),
    ],
)
def test_errors_are_our_own_types(error: Exception, ours: type[ShardserveError]) -> None:
    with pytest.raises(ours) as unary:
        Client(Handle(error)).generate("x")
    with pytest.raises(ours) as streamed:
        list(Client(Handle(error)).stream("x"))
    assert type(unary.value) is type(streamed.value) is ours


def test_what_an_error_carries_survives() -> None:
    with pytest.raises(Overloaded) as caught:
        Client(Handle(raised_by_user_code(Overloaded("full", 7.0)))).generate("x")
    assert caught.value.retry_after_s == 7.0


def test_a_stream_that_is_left_is_cancelled() -> None:
    handle = Handle(TextDelta(0, "a"), TextDelta(0, "b"))
    deltas = Client(handle).stream("x")
    assert next(deltas).text == "a"
    assert not handle.response.cancelled
    deltas.close()
    assert handle.response.cancelled


async def test_the_same_on_an_event_loop() -> None:
    assert await AsyncClient(Handle(COMPLETION)).generate("x") == COMPLETION
    handle = Handle(TextDelta(0, "a"), TextDelta(0, "b"))
    deltas = AsyncClient(handle).stream_chat([{"role": "user", "content": "x"}])
    assert (await anext(deltas)).text == "a"
    await deltas.aclose()
    assert handle.response.cancelled
    with pytest.raises(InvalidRequest):
        await AsyncClient(Handle(raised_by_user_code(InvalidRequest("no")))).chat([])


def test_no_call_waits_longer_than_its_deadline() -> None:
    unary = Handle(HANGS)
    with pytest.raises(DeadlineExceeded, match=r"within 0\.01 s"):
        Client(unary, timeout_s=0.01).generate("x")
    assert unary.response.cancelled
    streamed = Handle(TextDelta(0, "a"), HANGS)
    deltas = Client(streamed, timeout_s=1.0).stream("x")  # the first piece comes through a thread
    assert next(deltas).text == "a"
    with pytest.raises(DeadlineExceeded):
        next(deltas)
    assert streamed.response.cancelled


async def test_no_call_on_an_event_loop_waits_longer_either() -> None:
    unary = Handle(HANGS)
    with pytest.raises(DeadlineExceeded):
        await AsyncClient(unary, timeout_s=0.01).generate("x")
    assert unary.response.cancelled
    streamed = Handle(TextDelta(0, "a"), HANGS)
    deltas = AsyncClient(streamed, timeout_s=0.01).stream("x")
    assert (await anext(deltas)).text == "a"
    with pytest.raises(DeadlineExceeded):
        await anext(deltas)
    assert streamed.response.cancelled


async def test_a_call_that_is_cancelled_cancels_its_request() -> None:
    handle = Handle(HANGS)
    task = asyncio.create_task(AsyncClient(handle).generate("x"))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert handle.response.cancelled


def test_a_timeout_at_the_far_end_is_a_failure_there() -> None:
    with pytest.raises(GenerationFailed, match="TimeoutError: slow disk"):
        Client(Handle(raised_by_user_code(TimeoutError("slow disk")))).generate("x")


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan")])
def test_a_deadline_that_cannot_be(timeout_s: float) -> None:
    with pytest.raises(InvalidConfig, match="timeout_s must be above 0"):
        Client(Handle(), timeout_s)


def test_parameters_and_options_go_along() -> None:
    sampling, options = SamplingParams(min_p=0.1), RequestOptions(priority=1, cache_salt="me")
    handle = Handle(COMPLETION)
    Client(handle).generate("x", sampling, options)
    assert handle.arguments == ("x", sampling, options)
    list(Client(handle).stream("y", sampling, options))
    assert handle.arguments == ("y", sampling, options)
