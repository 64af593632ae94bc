"""`Client` and `AsyncClient`: the served model from any Python process of the Ray cluster, without HTTP.

They talk to the ingress deployment, so text, stops and limits are those of HTTP. Errors are our own types, never
Ray's. Knows a Serve handle and four calls; loads no torch.
"""

import logging
from collections.abc import AsyncGenerator, Generator, Sequence
from typing import Any, Self

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from cluster.driver.handle import as_ours
from cluster.errors import Unavailable
from cluster.generation import Completion, SamplingParams, TextDelta
from cluster.text.chat_template import ChatMessage
from cluster.text.prompts import Prompt

__all__ = ["AsyncClient", "Client"]


class _Connected:
    """A handle of the ingress, for unary calls and for streams."""

    def __init__(self, handle: Any) -> None:
        self._calls = handle
        self._streams = handle.options(stream=True)

    @classmethod
    def connect(cls, application: str = "shardserve", address: str | None = None) -> Self:
        """`application` is its name on Serve. Connects this process to Ray first if it is not: to `address`, or
        to the cluster that Ray finds by itself. Raises `Unavailable` when either is not there.
        """
        if not ray.is_initialized():
            try:
                ray.init(address=address or "auto", log_to_driver=False, logging_level=logging.WARNING)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise Unavailable(f"no Ray cluster at {address or 'auto'}: {error}") from error
        try:
            return cls(serve.get_app_handle(application))
        except RayServeException as error:
            raise Unavailable(f"no application {application!r} on this cluster: {error}") from error


class Client(_Connected):
    """Blocking calls. Every one raises `InvalidRequest`, `Overloaded`, `Unavailable` or `GenerationFailed`."""

    def generate(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Completion:
        """The whole completion of a raw prompt: text, or token ids."""
        return self._result(self._calls.generate.remote(prompt, sampling or SamplingParams()))

    def chat(self, messages: Sequence[ChatMessage], sampling: SamplingParams | None = None) -> Completion:
        """The whole answer to a conversation."""
        return self._result(self._calls.chat.remote(messages, sampling or SamplingParams()))

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Generator[TextDelta, None, None]:
        """The completion as it comes. Leaving the loop ends the request in the cluster."""
        return self._deltas(self._streams.stream.remote(prompt, sampling or SamplingParams()))

    def stream_chat(
        self, messages: Sequence[ChatMessage], sampling: SamplingParams | None = None
    ) -> Generator[TextDelta, None, None]:
        """The answer as it comes. Leaving the loop ends the request in the cluster."""
        return self._deltas(self._streams.stream_chat.remote(messages, sampling or SamplingParams()))

    def _result(self, response: Any) -> Completion:
        try:
            completion: Completion = response.result()
        except (RayError, RayServeException) as error:
            raise as_ours(error) from None
        return completion

    def _deltas(self, response: Any) -> Generator[TextDelta, None, None]:
        try:
            yield from response
        except (RayError, RayServeException) as error:
            raise as_ours(error) from None
        finally:
            response.cancel()


class AsyncClient(_Connected):
    """`Client` for an event loop: the same calls, to be awaited or iterated."""

    async def generate(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Completion:
        return await self._result(self._calls.generate.remote(prompt, sampling or SamplingParams()))

    async def chat(self, messages: Sequence[ChatMessage], sampling: SamplingParams | None = None) -> Completion:
        return await self._result(self._calls.chat.remote(messages, sampling or SamplingParams()))

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None) -> AsyncGenerator[TextDelta, None]:
        return self._deltas(self._streams.stream.remote(prompt, sampling or SamplingParams()))

    def stream_chat(
        self, messages: Sequence[ChatMessage], sampling: SamplingParams | None = None
    ) -> AsyncGenerator[TextDelta, None]:
        return self._deltas(self._streams.stream_chat.remote(messages, sampling or SamplingParams()))

    async def _result(self, response: Any) -> Completion:
        try:
            completion: Completion = await response
        except (RayError, RayServeException) as error:
            raise as_ours(error) from None
        return completion

    async def _deltas(self, response: Any) -> AsyncGenerator[TextDelta, None]:
        try:
            async for delta in response:
                yield delta
        except (RayError, RayServeException) as error:
            raise as_ours(error) from None
        finally:
            response.cancel()
