"""`Client` over a handle that answers as Serve's do: what is returned, cancelled and raised."""

from collections.abc import Iterator
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError
from ray.serve.exceptions import RayServeException

from cluster.client import AsyncClient, Client
from cluster.errors import GenerationFailed, InvalidRequest, Overloaded, ShardserveError, Unavailable
from cluster.generation import Completion, TextDelta

COMPLETION = Completion("id", (1,))


class Response:
    """A `DeploymentResponse` or `DeploymentResponseGenerator`, as far as the clients use one."""

    def __init__(self, items: list[Any]) -> None:
        self._items = items
        self.cancelled = False

    def result(self) -> Any:
        return next(iter(self))

    def __await__(self) -> Iterator[Any]:
        yield from ()
        return self.result()

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            if isinstance(item, Exception):
                raise item
            yield item

    async def __aiter__(self) -> Any:
        for item in self:
            yield item

    def cancel(self) -> None:
        self.cancelled = True


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
