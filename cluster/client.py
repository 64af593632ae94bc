"""`Client` and `AsyncClient`: the served model from any Python process of the Ray cluster, without HTTP.

They talk to the ingress deployment, so text, stops and limits are those of HTTP. Errors are our own types, never
Ray's, and every wait has a deadline. Knows a Serve handle and four calls; loads no torch.
"""

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, Generator, Sequence
from typing import Any, Self

import ray
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException

from cluster.driver.handle import app_handle, as_ours
from cluster.errors import DeadlineExceeded, InvalidConfig, ShardserveError, Unavailable
from cluster.generation import Completion, RequestOptions, SamplingParams, TextDelta
from cluster.launch.running import join_ray
from cluster.text.chat_template import ChatMessage
from cluster.text.prompts import Prompt

__all__ = ["AsyncClient", "Client"]

_TIMEOUT_S = 600.0  # a long answer behind a long queue; a cluster that hangs is found all the same
_FAILURES = (RayError, RayServeException, TimeoutError)


class _Connected:
    """A handle of the ingress, for unary calls and for streams.

    `timeout_s` bounds the whole of a call that returns a completion, and each wait for the next piece of a stream.
    """

    def __init__(self, handle: Any, timeout_s: float = _TIMEOUT_S) -> None:
        if not timeout_s > 0:
            raise InvalidConfig(f"timeout_s must be above 0, not {timeout_s}")
        self._calls = handle
        self._streams = handle.options(stream=True)
        self._timeout_s = timeout_s

    @classmethod
    def connect(
        cls, application: str = "shardserve", address: str | None = None, *, timeout_s: float = _TIMEOUT_S
    ) -> Self:
        """`application` is its name on Serve. Connects this process to Ray first if it is not: to `address`, else
        to RAY_ADDRESS, else to what `shardserve serve` or `ray start` of this user has started on this machine.
        Raises `Unavailable` when cluster or application is not there, or when several clusters are.
        """
        if not ray.is_initialized():
            join_ray(address)
        try:
            return cls(app_handle(application), timeout_s)
        except RayServeException as error:
            raise Unavailable(f"no application {application!r} on this cluster: {error}") from error

    def _ours(self, error: Exception) -> ShardserveError:
        """A timeout at the far end is a failure there; one that was met here is the caller's deadline."""
        if isinstance(error, TimeoutError) and not isinstance(error, RayTaskError):
            return DeadlineExceeded(f"no answer within {self._timeout_s:g} s; the request was ended")
        return as_ours(error)


class Client(_Connected):
    """Blocking calls.

    Every one raises `InvalidRequest`, `Overloaded`, `Unavailable`, `GenerationFailed` or `DeadlineExceeded`.
    """

    def generate(
        self, prompt: Prompt, sampling: SamplingParams | None = None, options: RequestOptions | None = None
    ) -> Completion:
        """The whole completion of a raw prompt: text, or token ids."""
        return self._result(self._calls.generate.remote(prompt, sampling or SamplingParams(), options))

    def chat(
        self,
        messages: Sequence[ChatMessage],
        sampling: SamplingParams | None = None,
        options: RequestOptions | None = None,
    ) -> Completion:
        """The whole answer to a conversation."""
        return self._result(self._calls.chat.remote(messages, sampling or SamplingParams(), options))

    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, options: RequestOptions | None = None
    ) -> Generator[TextDelta, None, None]:
        """The completion as it comes. Leaving the loop ends the request in the cluster."""
        return self._deltas(self._streams.stream.remote(prompt, sampling or SamplingParams(), options))

    def stream_chat(
        self,
        messages: Sequence[ChatMessage],
        sampling: SamplingParams | None = None,
        options: RequestOptions | None = None,
    ) -> Generator[TextDelta, None, None]:
        """The answer as it comes. Leaving the loop ends the request in the cluster."""
        return self._deltas(self._streams.stream_chat.remote(messages, sampling or SamplingParams(), options))

    def _result(self, response: Any) -> Completion:
        try:
            completion: Completion = response.result(timeout_s=self._timeout_s)
        except _FAILURES as error:
            response.cancel()
            raise self._ours(error) from None
        except KeyboardInterrupt:
            response.cancel()
            raise
        return completion

    def _deltas(self, response: Any) -> Generator[TextDelta, None, None]:
        """Ray's generator takes no deadline, so a thread reads it; cancelling the request ends the thread."""
        pieces: queue.SimpleQueue[TextDelta | BaseException | None] = queue.SimpleQueue()
        threading.Thread(target=_read, args=(response, pieces), name="shardserve-stream", daemon=True).start()
        try:
            while (piece := pieces.get(timeout=self._timeout_s)) is not None:
                if isinstance(piece, BaseException):
                    raise piece
                yield piece
        except queue.Empty:
            raise self._ours(TimeoutError()) from None
        except _FAILURES as error:
            raise self._ours(error) from None
        finally:
            response.cancel()


def _read(response: Any, pieces: "queue.SimpleQueue[TextDelta | BaseException | None]") -> None:
    """Everything that comes, then what ended it: an error, or None."""
    end: BaseException | None = None
    try:
        for delta in response:
            pieces.put(delta)
    except (Exception, asyncio.CancelledError) as error:  # the reader of `pieces` raises it, if there is still one
        end = error
    pieces.put(end)


class AsyncClient(_Connected):
    """`Client` for an event loop: the same calls, to be awaited or iterated."""

    async def generate(
        self, prompt: Prompt, sampling: SamplingParams | None = None, options: RequestOptions | None = None
    ) -> Completion:
        return await self._result(self._calls.generate.remote(prompt, sampling or SamplingParams(), options))

    async def chat(
        self,
        messages: Sequence[ChatMessage],
        sampling: SamplingParams | None = None,
        options: RequestOptions | None = None,
    ) -> Completion:
        return await self._result(self._calls.chat.remote(messages, sampling or SamplingParams(), options))

    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, options: RequestOptions | None = None
    ) -> AsyncGenerator[TextDelta, None]:
        return self._deltas(self._streams.stream.remote(prompt, sampling or SamplingParams(), options))

    def stream_chat(
        self,
        messages: Sequence[ChatMessage],
        sampling: SamplingParams | None = None,
        options: RequestOptions | None = None,
    ) -> AsyncGenerator[TextDelta, None]:
        return self._deltas(self._streams.stream_chat.remote(messages, sampling or SamplingParams(), options))

    async def _result(self, response: Any) -> Completion:
        try:
            async with asyncio.timeout(self._timeout_s):
                completion: Completion = await response
        except _FAILURES as error:
            response.cancel()
            raise self._ours(error) from None
        except asyncio.CancelledError:
            response.cancel()
            raise
        return completion

    async def _deltas(self, response: Any) -> AsyncGenerator[TextDelta, None]:
        pieces = aiter(response)
        try:
            while True:
                async with asyncio.timeout(self._timeout_s):
                    delta = await anext(pieces, None)
                if delta is None:
                    return
                yield delta
        except _FAILURES as error:
            raise self._ours(error) from None
        finally:
            response.cancel()
