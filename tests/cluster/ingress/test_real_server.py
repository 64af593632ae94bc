"""The app behind a real server and real sockets: what a fake transport could hide."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from tests.cluster.ingress.served import COMPLETIONS, app_over, completion, events
from tests.fakes.scripted_source import ScriptedSource


@asynccontextmanager
async def serving(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="off"))
    running = asyncio.create_task(server.serve())
    try:
        async with asyncio.timeout(60):
            while not server.started:
                await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            yield client
    finally:
        server.should_exit = True
        await running


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


async def test_tokens_arrive_while_the_next_is_not_there_and_leaving_aborts() -> None:
    source = ScriptedSource(pause_after=2)
    async with serving(app_over(source)) as client:
        body = completion(stream=True, max_tokens=100)
        async with client.stream("POST", COMPLETIONS, json=body) as answer:
            assert answer.status_code == 200
            seen = ""
            async for piece in answer.aiter_text():
                seen += piece
                if '"c"' in seen:
                    break
            assert [event["choices"][0]["text"] for event in events(seen)] == ["b", "c"]
        await until(lambda: len(source.aborted) == 1)
        assert source.running == {}


async def test_a_client_that_gives_up_on_a_whole_answer_aborts() -> None:
    source = ScriptedSource(pause_after=2)
    async with serving(app_over(source)) as client:
        asking = asyncio.create_task(client.post(COMPLETIONS, json=completion(max_tokens=100)))
        await until(lambda: bool(source.running))
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await until(lambda: len(source.aborted) == 1)


async def test_head_answers_as_get_does_without_a_body() -> None:
    reason: str | None = "rank 1 of 2 is being restarted"
    async with serving(app_over(ScriptedSource(), unavailable_because=lambda: reason)) as client:
        for sick in (True, False):
            for path in ("/health", "/live", "/version", "/v1/models"):
                head, get = await client.head(path), await client.get(path)
                assert head.status_code == get.status_code == (503 if sick and path == "/health" else 200)
                assert (head.content, head.headers["content-length"]) == (b"", str(len(get.content)))
                assert head.headers.get("retry-after") == get.headers.get("retry-after")
            reason = None
