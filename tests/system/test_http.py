"""HTTP from end to end: real Serve, real driver, two real ranks."""

import asyncio
import json

import httpx
import openai
import pytest

from cluster.generation import FinishReason
from tests.system.conftest import MODEL, Served, counted
from tests.system.processes import wait_until

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]  # the first one starts Ray


def chat_body(**more: object) -> dict[str, object]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "count"}], "max_tokens": 40, **more}


def events(response: httpx.Response) -> list[dict[str, object]]:
    lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_chat_is_the_same_streamed_and_plain(served: Served) -> None:
    plain = httpx.post(f"{served.url}/v1/chat/completions", json=chat_body(), timeout=60)
    with httpx.stream(
        "POST", f"{served.url}/v1/chat/completions", json=chat_body(stream=True), timeout=60
    ) as response:
        pieces = [
            choice["delta"].get("content") or ""
            for event in events(response)
            for choice in event["choices"]  # type: ignore[attr-defined]
        ]

    choice = plain.json()["choices"][0]
    assert choice["message"]["content"] == "".join(pieces) == counted(" ", 40)  # the template ends with a space
    assert choice["finish_reason"] == "length"
    assert plain.json()["usage"]["completion_tokens"] == 40


async def test_the_official_client_works(served: Served) -> None:
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id async for model in client.models.list()] == [MODEL]
        answer = await client.completions.create(model=MODEL, prompt="abc", max_tokens=8, temperature=0)
        stream = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "count"}], max_tokens=12, stop="$", stream=True
        )
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.completions.create(model="other", prompt="abc")
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await client.completions.create(model=MODEL, prompt="abc", temperature=3)

    assert answer.choices[0].text == counted("c", 8)
    assert "".join(pieces) == '!"#'


async def test_thirty_two_streams_at_once_are_all_exact(served: Served) -> None:
    async with httpx.AsyncClient(base_url=served.url, timeout=90) as client:

        async def answer(start: str, tokens: int) -> str:
            body = {"model": MODEL, "prompt": start, "max_tokens": tokens, "stream": True}
            pieces = []
            async with client.stream("POST", "/v1/completions", json=body) as response:
                assert response.status_code == 200
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        pieces.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
            return "".join(pieces)

        starts = [chr(40 + i) for i in range(32)]
        answers = await asyncio.gather(*(answer(start, 50 + i) for i, start in enumerate(starts)))

    for i, (start, text) in enumerate(zip(starts, answers, strict=True)):
        assert text == counted(start, 50 + i)


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_client_that_leaves_frees_its_blocks(served: Served, streaming: bool) -> None:
    aborted = (await asyncio.to_thread(served.stats)).finished[FinishReason.ABORT]
    body = {"model": MODEL, "prompt": "abc", "max_tokens": 3500, "stream": streaming}
    async with httpx.AsyncClient(base_url=served.url, timeout=60) as client:
        request = asyncio.create_task(client.post("/v1/completions", json=body))
        await asyncio.to_thread(wait_until, lambda: served.stats().running == 1, "the request runs")
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)

    await asyncio.to_thread(
        wait_until, lambda: served.stats().finished[FinishReason.ABORT] == aborted + 1, "it is aborted"
    )
    stats = await asyncio.to_thread(served.stats)
    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.free_blocks == stats.total_blocks
