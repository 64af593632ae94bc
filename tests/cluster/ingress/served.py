"""The ASGI app over a scripted source, and the smallest HTTP client that can see a stream as it is sent.

httpx's ASGI transport hands over a response only when it is whole; `Exchange` shows each message when it comes,
can be slow to take it, and can hang up.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import httpx
import openai
from fastapi import FastAPI

from cluster.engine.stats import EngineStats
from cluster.ingress.admission import Limits
from cluster.ingress.app import build_app
from cluster.text.chat_template import ChatTemplate
from cluster.text.completer import Completer
from tests.fakes.byte_tokenizer import CHAT_TEMPLATE, SPECIAL_TOKENS, ByteTokenizer
from tests.fakes.scripted_source import ScriptedSource

MODEL = "tiny"
CONTEXT = 256
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


async def no_stats() -> Mapping[str, EngineStats]:
    return {}


def app_over(
    source: ScriptedSource,
    *,
    bos: bool = False,
    template: bool = True,
    limits: Limits | None = None,
    unavailable_because: Callable[[], str | None] = lambda: None,
    engine_stats: Callable[[], Awaitable[Mapping[str, EngineStats]]] = no_stats,
) -> FastAPI:
    chat_template = ChatTemplate(CHAT_TEMPLATE, SPECIAL_TOKENS) if template else None
    completer = Completer(ByteTokenizer(bos=bos), chat_template, source, CONTEXT)
    return build_app(
        completer,
        MODEL,
        unavailable_because,
        engine_stats=engine_stats,
        version="1.2.3",
        limits=limits,
        clock=lambda: 1000.0,
    )


def http(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://served")


def openai_client(app: FastAPI) -> openai.AsyncOpenAI:
    client: Any = http(app)  # httpx is taken, though the annotation names its successor only
    return openai.AsyncOpenAI(
        base_url="http://served/v1", api_key="none", http_client=client, max_retries=0, timeout=30
    )


def chat(text: str = "hi", **body: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **body}


def completion(prompt: Any = "a", **body: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, **body}


def events(text: str) -> list[Any]:
    """The data of server-sent events: parsed, or `[DONE]` as it stands."""
    parts = text.split("\n\n")
    assert parts.pop() == "", "an event was cut off"
    data = [part.removeprefix("data: ") for part in parts]
    return [one if one == "[DONE]" else json.loads(one) for one in data]


class Exchange:
    """One request to `app`. While `reading` is clear, the client takes nothing more."""

    def __init__(self, app: FastAPI, path: str, body: dict[str, Any]) -> None:
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.chunks: list[str] = []
        self.ended = False
        self.break_after: int | None = None  # chunks; then sending fails
        self.reading = asyncio.Event()
        self.reading.set()
        self._gone = asyncio.Event()
        self._body: bytes | None = json.dumps(body).encode()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json")],
            "client": ("client", 1),
            "server": ("served", 80),
        }
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    @property
    def text(self) -> str:
        return "".join(self.chunks)

    def hang_up(self) -> None:
        self._gone.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0)

    async def finish(self) -> None:
        async with asyncio.timeout(60):
            await self.task

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        await self.reading.wait()
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        elif len(self.chunks) == self.break_after:
            raise BrokenPipeError
        else:
            self.chunks.append(message.get("body", b"").decode())
            self.ended = not message.get("more_body", False)
