"""One streamed completion over HTTP: when its tokens came, and how it ended.

Knows server-sent events in OpenAI's shape; knows nothing of load patterns or statistics.
"""

import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """What is asked of the server."""

    model: str
    prompt: str
    max_tokens: int
    ignore_eos: bool = True  # an extension that vLLM, llama.cpp and we know: equal output lengths compare
    include_usage: bool = True

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "stream": True,
        }
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.include_usage:
            body["stream_options"] = {"include_usage": True}
        return body


@dataclass(slots=True, kw_only=True)
class Sample:
    """One request on the client's clock, in seconds. `failure` is None when the stream ended as it should."""

    started: float
    chunk_times: list[float] = field(default_factory=list)  # arrivals of chunks that carry text
    ended: float = 0.0
    output_tokens: int = 0
    prompt_tokens: int | None = None  # None when the server reports no usage
    failure: str | None = None


async def stream_completion(
    client: httpx.AsyncClient,
    request: CompletionRequest,
    *,
    started: float | None = None,
    clock: Clock = time.perf_counter,
) -> Sample:
    """Send `request` and read its stream to the end. Never raises for what a server or the network can do.

    `started` is when the request was due: an open loop counts the wait for its own client as latency.
    """
    sample = Sample(started=clock() if started is None else started)
    try:
        async with client.stream("POST", "/v1/completions", json=request.body()) as response:
            if response.status_code != 200:
                detail = _error_message(await response.aread())
                sample.failure = f"HTTP {response.status_code}: {detail}"
            else:
                await _read_stream(response, sample, clock)
    except httpx.TimeoutException as error:
        sample.failure = f"timeout ({type(error).__name__})"
    except httpx.HTTPError as error:
        sample.failure = f"{type(error).__name__}: {error}".strip().rstrip(":")
    sample.ended = clock()
    return sample


async def _read_stream(response: httpx.Response, sample: Sample, clock: Clock) -> None:
    usage: dict[str, Any] | None = None
    finished = False
    async for event in _events(response.aiter_bytes()):
        now = clock()
        if event == "[DONE]":
            break
        try:
            chunk: dict[str, Any] = dict(json.loads(event))
        except (ValueError, TypeError):
            sample.failure = f"not a JSON object in the stream: {event[:80]!r}"
            return
        if "error" in chunk:
            sample.failure = f"error in the stream: {_message_of(chunk)}"
            return
        usage = chunk.get("usage") or usage
        for choice in chunk.get("choices", ()):
            if choice.get("text"):
                sample.chunk_times.append(now)
            finished = finished or choice.get("finish_reason") is not None
    if not finished:
        sample.failure = "the stream ended without a finish_reason"
    sample.output_tokens = usage["completion_tokens"] if usage else len(sample.chunk_times)
    sample.prompt_tokens = usage["prompt_tokens"] if usage else None


async def _events(chunks: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """The data of each server-sent event (OpenAI's have one line each); other fields and comments are skipped."""
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip().decode("utf-8", errors="replace")


def _error_message(content: bytes) -> str:
    try:
        return _message_of(json.loads(content))
    except ValueError:
        return content[:120].decode("utf-8", errors="replace").strip()


def _message_of(body: Any) -> str:
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)[:120]
