"""The HTTP face: routes, and what each does between a body and an answer.

Knows OpenAI's endpoints and a `Completer`; knows nothing of Ray, drivers or tokens. Every answer that is not 200
has OpenAI's error shape, unknown routes included.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.engine.stats import EngineStats
from cluster.errors import ContextOverflow, ModelNotFound, ShardserveError, Unavailable
from cluster.ingress.admission import Limits
from cluster.ingress.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, parse
from cluster.ingress.logprobs import echo_of
from cluster.ingress.openai import api_error
from cluster.ingress.rendering import Identity
from cluster.ingress.scrape import Scrape
from cluster.ingress.sse import Answer
from cluster.text.completer import Completer

_log = logging.getLogger(__name__)

_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions; chat has none
_READ = ["GET", "HEAD"]  # the HTTP server leaves the body of an answer to HEAD out


def build_app(
    completer: Completer,
    model_name: str,
    unavailable_because: Callable[[], str | None],
    *,
    engine_stats: Callable[[], Awaitable[Mapping[str, EngineStats]]],
    version: str,
    limits: Limits | None = None,
    clock: Callable[[], float] = time.time,
) -> FastAPI:
    """The ASGI application of one served model.

    `unavailable_because` says why no token can be made at the moment, None when one can; it must not block.
    `engine_stats` asks the drivers what they have counted, by their addresses.
    """
    scrape = Scrape(engine_stats, completer.meter, unavailable_because, version=version, model=model_name)
    endpoints = _Endpoints(completer, model_name, unavailable_because, version, limits or Limits(), clock)
    app = FastAPI(
        title="shardserve",
        version=version,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,  # a redirected POST has an empty answer, which clients take for ours
    )
    app.add_api_route("/v1/chat/completions", endpoints.chat, methods=["POST"])
    app.add_api_route("/v1/completions", endpoints.complete, methods=["POST"])
    app.add_api_route("/v1/models", endpoints.models, methods=_READ)
    app.add_api_route("/v1/models/{name:path}", endpoints.model, methods=_READ)
    app.add_api_route("/tokenize", endpoints.tokenize, methods=["POST"])
    app.add_api_route("/detokenize", endpoints.detokenize, methods=["POST"])
    app.add_api_route("/health", endpoints.health, methods=_READ)
    app.add_api_route("/live", endpoints.live, methods=_READ)
    app.add_api_route("/version", endpoints.version, methods=_READ)
    app.add_api_route("/metrics", scrape.answer, methods=_READ)
    app.add_exception_handler(ShardserveError, _refuse)
    app.add_exception_handler(HTTPException, _refuse)
    app.add_middleware(_LastResort)
    return app


class _Endpoints:
    """One served model behind OpenAI's routes."""

    def __init__(
        self,
        completer: Completer,
        model_name: str,
        unavailable_because: Callable[[], str | None],
        version: str,
        limits: Limits,
        clock: Callable[[], float],
    ) -> None:
        self._completer = completer
        self._model_name = model_name
        self._unavailable_because = unavailable_because
        self._version = version
        self._limits = limits
        self._clock = clock
        self._started = int(clock())

    async def chat(self, request: Request) -> Response:
        body = parse(ChatBody, await self._limits.read_body(request))
        self._check_model(body.model)
        identity = self._identity("chatcmpl", chat=True)
        sampling, options = body.sampling(), body.options()
        self._limits.check_options(options)
        self._limits.check(1, sampling.n)
        messages = [message.for_template() for message in body.messages]
        prepared = await self._completer.prepare_chat(identity.answer_id, messages, sampling, options)
        return Answer(self._completer, [prepared], identity, body.form)

    async def complete(self, request: Request) -> Response:
        body = parse(CompletionBody, await self._limits.read_body(request))
        self._check_model(body.model)
        identity = self._identity("cmpl", chat=False)
        sampling, options = body.sampling(), body.options()
        self._limits.check_options(options)
        self._limits.check(len(body.prompt), sampling.n)
        prepared = [
            await self._completer.prepare(
                f"{identity.answer_id}-{index}",
                prompt,
                sampling,
                "prompt" if len(body.prompt) == 1 else f"prompt[{index}]",
                default_max_tokens=_COMPLETION_TOKENS,
                options=options,
            )
            for index, prompt in enumerate(body.prompt)
        ]
        echoes = [
            await asyncio.to_thread(echo_of, prompt, one.prompt_token_ids, self._completer.tokenizer)
            for prompt, one in zip(body.prompt, prepared, strict=True)
            if body.form.echo
        ]
        return Answer(self._completer, prepared, identity, body.form, echoes)

    async def models(self) -> Response:
        return JSONResponse({"object": "list", "data": [self._model_object()]})

    async def model(self, name: str) -> Response:
        if not name:
            raise HTTPException(404)
        self._check_model(name)
        return JSONResponse(self._model_object())

    async def tokenize(self, request: Request) -> Response:
        """Exactly the ids that would be fed to the model."""
        body = parse(TokenizeBody, await self._limits.read_body(request))
        if body.model is not None:
            self._check_model(body.model)
        encoder = self._completer.encoder
        if body.messages is not None:
            messages = [message.for_template() for message in body.messages]
            ids = await asyncio.to_thread(encoder.encode_chat, messages)
        else:
            prompt, add = body.prompt or "", body.add_special_tokens
            ids = await asyncio.to_thread(encoder.encode, prompt, add_special_tokens=add)
        return JSONResponse({"count": len(ids), "max_model_len": encoder.max_model_len, "tokens": ids})

    async def detokenize(self, request: Request) -> Response:
        body = parse(DetokenizeBody, await self._limits.read_body(request))
        if body.model is not None:
            self._check_model(body.model)
        encoder = self._completer.encoder
        if len(body.tokens) > encoder.max_model_len:
            raise ContextOverflow(
                f"tokens has {len(body.tokens)} tokens, but the maximum context length of this model is "
                f"{encoder.max_model_len} tokens",
                "tokens",
            )
        ids = encoder.encode(body.tokens, "tokens") if body.tokens else ()
        return JSONResponse({"prompt": await asyncio.to_thread(self._completer.tokenizer.decode, ids)})

    async def health(self) -> Response:
        """200 only when a token can be made."""
        reason = self._unavailable_because()
        if reason is not None:
            raise Unavailable(reason)
        return JSONResponse({"status": "ok"})

    async def live(self) -> Response:
        """200 as long as this process answers."""
        return JSONResponse({"status": "ok"})

    async def version(self) -> Response:
        return JSONResponse({"version": self._version})

    def _check_model(self, name: str) -> None:
        if name != self._model_name:
            raise ModelNotFound(
                f"the model {name[:100]!r} does not exist here; this server has {self._model_name!r}"
            )

    def _identity(self, prefix: str, *, chat: bool) -> Identity:
        return Identity(f"{prefix}-{uuid.uuid4().hex}", int(self._clock()), self._model_name, chat)

    def _model_object(self) -> dict[str, object]:
        return {
            "id": self._model_name,
            "object": "model",
            "created": self._started,
            "owned_by": "shardserve",
            "max_model_len": self._completer.encoder.max_model_len,
        }


async def _refuse(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException) and error.status_code == 404:
        error = HTTPException(404, f"there is no route {request.method} {request.url.path}")
    elif isinstance(error, HTTPException) and error.status_code == 405:
        detail = f"{request.url.path} does not take {request.method}"
        error = HTTPException(405, detail, headers=error.headers)
    return api_error(error).response()


class _LastResort:
    """The one place where any exception ends: it is logged, and the client gets a plain 500."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except ClientDisconnect:
            pass
        except Exception as error:
            if scope["type"] != "http":
                raise
            _log.exception("%s %s failed", scope["method"], scope["path"])
            if not started:
                await api_error(error).response()(scope, receive, send)
