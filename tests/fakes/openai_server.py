"""A small OpenAI-compatible server in this process, for what talks to servers. Counts and refuses on request.

Its tokens are words: a prompt of five words is five tokens, and every chunk of a stream is one token.
"""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

_START_DEADLINE_S = 10.0


@dataclass
class FakeBehaviour:
    """What the server does, and what it saw."""

    reports_usage: bool = True
    refuses_stream_options: bool = False
    fails_with: int | None = None  # status for every completion
    fails_after_requests: int | None = None  # that many are answered, the rest get a 500
    breaks_after_tokens: int | None = None  # the stream ends without finish_reason
    error_after_tokens: int | None = None  # an error event instead of the rest
    stalls_after_requests: int | None = (
        None  # that many are answered, the rest get a stream without anything in it
    )
    worker_seconds: list[dict[str, float]] = field(default_factory=list)  # by part, in one scrape after the other
    requests: list[dict[str, Any]] = field(default_factory=list)
    running: int = 0
    most_running: int = 0


def build_fake_app(behaviour: FakeBehaviour) -> FastAPI:
    app = FastAPI()

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": "fake-model", "object": "model"}]}

    @app.get("/metrics")
    async def metrics() -> Response:
        if not behaviour.worker_seconds:
            return _error(404, "no such route")
        name = "shardserve_worker_seconds_total"
        parts = behaviour.worker_seconds.pop(0)
        lines = [f'{name}{{part="{part}"}} {seconds}' for part, seconds in parts.items()]
        return Response("\n".join([f"# TYPE {name} counter", *lines, ""]), media_type="text/plain")

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await request.json()
        behaviour.requests.append(body)
        refusal = _refusal(behaviour, body)
        if refusal is not None:
            return refusal
        last = behaviour.stalls_after_requests
        stalls = last is not None and len(behaviour.requests) > last
        return StreamingResponse(_stream(behaviour, body, stalls=stalls), media_type="text/event-stream")

    return app


def _refusal(behaviour: FakeBehaviour, body: dict[str, Any]) -> Response | None:
    if behaviour.refuses_stream_options and "stream_options" in body:
        return _error(400, "unknown parameter: stream_options")
    if behaviour.fails_with is not None:
        return _error(behaviour.fails_with, "told to fail")
    if behaviour.fails_after_requests is not None and len(behaviour.requests) > behaviour.fails_after_requests:
        return _error(500, "told to fail later")
    return None


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": "fake", "code": None}}, status_code=status)


async def _stream(behaviour: FakeBehaviour, body: dict[str, Any], *, stalls: bool) -> AsyncIterator[str]:
    behaviour.running += 1
    behaviour.most_running = max(behaviour.most_running, behaviour.running)
    try:
        while stalls:
            await asyncio.sleep(0.05)
        wanted = int(body["max_tokens"])
        for token in range(wanted):
            if token == behaviour.breaks_after_tokens:
                return
            if token == behaviour.error_after_tokens:
                yield _event({"error": {"message": "told to break"}})
                return
            last = token == wanted - 1
            yield _event({"choices": [{"index": 0, "text": " word", "finish_reason": "length" if last else None}]})
            await asyncio.sleep(0)
        if behaviour.reports_usage and body.get("stream_options", {}).get("include_usage"):
            usage = {"prompt_tokens": len(body["prompt"].split()), "completion_tokens": wanted}
            yield _event({"choices": [], "usage": usage})
        yield "data: [DONE]\n\n"
    finally:
        behaviour.running -= 1


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


@contextmanager
def serve_fake(behaviour: FakeBehaviour) -> Iterator[str]:
    """Serve on a free port in a thread; gives the base URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(build_fake_app(behaviour), log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        server.force_exit = True  # a stalled stream must not hold the test back
        thread.join(_START_DEADLINE_S)
        listener.close()
