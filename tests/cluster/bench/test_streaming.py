"""One streamed completion: what is measured, and every way it can fail."""

import httpx
import pytest

from cluster.bench.streaming import CompletionRequest, Sample, stream_completion
from tests.fakes.openai_server import FakeBehaviour, serve_fake

REQUEST = CompletionRequest(model="fake-model", prompt="one two three", max_tokens=5)


async def _run(behaviour: FakeBehaviour, request: CompletionRequest = REQUEST, timeout_s: float = 10) -> Sample:
    with serve_fake(behaviour) as url:
        async with httpx.AsyncClient(base_url=url, timeout=timeout_s, trust_env=False) as client:
            return await stream_completion(client, request)


async def test_a_stream_is_timed_and_counted_by_usage() -> None:
    behaviour = FakeBehaviour()
    sample = await _run(behaviour)
    assert sample.failure is None
    assert (sample.prompt_tokens, sample.output_tokens, len(sample.chunk_times)) == (3, 5, 5)
    assert sample.started <= sample.chunk_times[0] <= sample.chunk_times[-1] <= sample.ended
    assert behaviour.requests[0]["ignore_eos"] is True
    assert behaviour.requests[0]["stream_options"] == {"include_usage": True}


async def test_without_usage_chunks_are_counted() -> None:
    sample = await _run(FakeBehaviour(reports_usage=False))
    assert sample.failure is None
    assert (sample.prompt_tokens, sample.output_tokens) == (None, 5)


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        (FakeBehaviour(fails_with=503), "HTTP 503: told to fail"),
        (FakeBehaviour(breaks_after_tokens=2), "without a finish_reason"),
        (FakeBehaviour(error_after_tokens=2), "error in the stream: told to break"),
    ],
)
async def test_failures_have_their_reason(behaviour: FakeBehaviour, reason: str) -> None:
    sample = await _run(behaviour)
    assert sample.failure is not None
    assert reason in sample.failure


async def test_a_silent_stream_is_a_timeout() -> None:
    sample = await _run(FakeBehaviour(stalls_after_requests=0), timeout_s=1.0)
    assert sample.failure == "timeout (ReadTimeout)"


async def test_no_server_is_a_failure_not_an_exception() -> None:
    async with httpx.AsyncClient(base_url="http://127.0.0.1:9", trust_env=False) as client:
        sample = await stream_completion(client, REQUEST)
    assert sample.failure is not None
    assert "ConnectError" in sample.failure


async def test_events_survive_any_chunking() -> None:
    text = (
        b': comment\n\ndata: {"choices":[{"text":"h\xc3\xa9","finish_reason":null}]}\n\n'
        b'data:{"choices":[{"text":"y","finish_reason":"stop"}]}\r\n\r\ndata: [DONE]\n\n'
    )
    for size in range(1, len(text) + 1):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        transport = httpx.MockTransport(lambda _, pieces=pieces: httpx.Response(200, content=_aiter(pieces)))
        async with httpx.AsyncClient(base_url="http://fake", transport=transport) as client:
            sample = await stream_completion(client, REQUEST)
        assert sample.failure is None
        assert sample.output_tokens == 2


async def _aiter(pieces: list[bytes]):  # type: ignore[no-untyped-def]
    for piece in pieces:
        yield piece


async def test_not_json_is_named() -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=b"data: <html>\n\n"))
    async with httpx.AsyncClient(base_url="http://fake", transport=transport) as client:
        sample = await stream_completion(client, REQUEST)
    assert sample.failure == "not a JSON object in the stream: '<html>'"
