"""A prepared request as an HTTP response: streamed as server-sent events, or whole.

Nothing is sent before every prompt has its first token, so that a refusal has its own status with and without
`stream`. The client's going away ends the work at once. Knows ASGI and a `Feed`; knows nothing of request bodies.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from cluster.errors import ShardserveError
from cluster.generation import GenerationRequest
from cluster.ingress.feed import Feed
from cluster.ingress.logprobs import Echo
from cluster.ingress.openai import api_error
from cluster.ingress.rendering import (
    DONE,
    AnswerForm,
    ChunkRenderer,
    Contents,
    Identity,
    Usage,
    error_event,
    whole_answer,
)
from cluster.text.choice import CompletionBuilder
from cluster.text.completer import Completer

_log = logging.getLogger(__name__)

_STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx and its kin would otherwise hold events back
)


class Answer(Response):
    """Owns the request's run from the first token to the last byte."""

    def __init__(
        self,
        completer: Completer,
        requests: Sequence[GenerationRequest],
        identity: Identity,
        form: AnswerForm,
        echoes: Sequence[Echo] = (),  # by request, where the form asks for them
    ) -> None:
        self._completer = completer
        self._requests = requests
        self._identity = identity
        self._form = form
        self._owners = [request for request in requests for _ in range(request.sampling.n)]  # by choice
        owned_echoes = [
            echo for echo, request in zip(echoes, requests, strict=bool(echoes)) for _ in range(request.sampling.n)
        ]
        self._contents = Contents(identity, completer.tokenizer, logprobs=form.logprobs, echoes=owned_echoes)
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_client_leaves(receive, self._answer(scope, receive, send))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with Feed(self._completer, self._requests) as feed:
            await feed.started()
            if self._form.stream:
                await self._send_events(feed, send)
            else:
                await (await self._whole(feed))(scope, receive, send)

    async def _whole(self, feed: Feed) -> JSONResponse:
        builders = {request.request_id: CompletionBuilder(request) for request in self._requests}
        while taken := await feed.take():
            for choice, delta in taken.items():
                builders[self._owners[choice].request_id].add(delta)
        body = whole_answer(self._contents, [builder.completion() for builder in builders.values()])
        return JSONResponse(body)

    async def _send_events(self, feed: Feed, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": list(_STREAM_HEADERS)}
        try:
            await send(start)
            async with aclosing(self._events(feed)) as pieces:
                async for events in pieces:
                    await send({"type": "http.response.body", "body": events.encode(), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError:
            raise ClientDisconnect from None  # how some servers tell that the client has gone

    async def _events(self, feed: Feed) -> AsyncGenerator[str, None]:
        """The events of the answer, in pieces to be sent at once. The first has the roles and the first tokens."""
        renderer = ChunkRenderer(self._contents, include_usage=self._form.include_usage)
        events = renderer.opening(len(self._owners))
        billed = cached = 0
        try:
            while taken := await feed.take():
                for choice, delta in taken.items():
                    events += renderer.delta(choice, delta)
                    billed += len(delta.token_ids)
                    cached += delta.num_cached_tokens if delta.choice == 0 else 0
                if events:
                    yield events
                    events = ""
        except Exception as error:
            if not isinstance(error, ShardserveError):
                _log.exception("%s failed in the middle of its stream", self._identity.answer_id)
            yield events + error_event(api_error(error).body())
            return
        if self._form.include_usage:
            prompts = sum(len(request.prompt_token_ids) for request in self._requests)
            events += renderer.usage(Usage(prompts, billed, cached))
        yield events + DONE


async def unless_client_leaves(receive: Receive, work: Coroutine[None, None, None]) -> None:
    """Run `work` to its end, or cancel it when the client disconnects. The request's body has been read."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
    finally:
        watching.cancel()
        if not working.done():
            working.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
    if not working.cancelled():
        working.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
