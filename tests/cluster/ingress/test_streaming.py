"""Streams as they are sent: at once, merged for a slow client, ended by an error or by the client's leaving."""

import asyncio
from typing import Any

import pytest

from cluster.errors import Unavailable
from tests.cluster.ingress.served import CHAT, COMPLETIONS, Exchange, app_over, chat, completion, events, http
from tests.fakes.scripted_source import ScriptedSource, says


async def test_headers_and_order_of_events() -> None:
    answer = await http(app_over(ScriptedSource(says("ab")))).post(
        CHAT, json=chat(stream=True, stream_options={"include_usage": True})
    )
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    opening, *texts, ending, usage, done = events(answer.text)
    assert opening["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert "".join(text["choices"][0]["delta"]["content"] for text in texts) == "ab"
    assert ending["choices"][0] == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
    }
    assert usage["usage"]["completion_tokens"] == 3
    assert done == "[DONE]"


async def test_usage_is_absent_unless_asked_for() -> None:
    answer = await http(app_over(ScriptedSource())).post(COMPLETIONS, json=completion(stream=True))
    assert all("usage" not in event for event in events(answer.text)[:-1])


async def test_the_first_token_is_awaited_before_anything_is_sent_and_then_flushed_at_once() -> None:
    source = ScriptedSource(pause_after=0)
    exchange = Exchange(app_over(source), CHAT, chat(stream=True))
    await exchange.until(lambda: bool(source.running))
    for _ in range(50):
        await asyncio.sleep(0)
    assert exchange.status is None
    source.pause_after = None
    source.resume.set()
    await exchange.until(lambda: exchange.status == 200)
    await exchange.finish()


async def test_each_token_is_sent_while_the_next_is_not_there() -> None:
    source = ScriptedSource(pause_after=2)
    exchange = Exchange(app_over(source), COMPLETIONS, completion(stream=True, max_tokens=4))
    await exchange.until(lambda: "c" in "".join(event["choices"][0]["text"] for event in events(exchange.text)))
    assert not exchange.ended
    source.resume.set()
    await exchange.finish()
    assert exchange.ended


async def test_a_client_that_is_behind_gets_one_merged_chunk() -> None:
    source = ScriptedSource(pause_after=1)
    exchange = Exchange(app_over(source), COMPLETIONS, completion(stream=True, max_tokens=100))
    await exchange.until(lambda: len(exchange.chunks) == 1)
    exchange.reading.clear()
    source.resume.set()
    await exchange.until(lambda: not source.running)  # all tokens are made, none is taken
    exchange.reading.set()
    await exchange.finish()
    texts = [event["choices"][0]["text"] for event in events(exchange.text)[:-1]]
    assert "".join(texts).encode() == bytes(range(98, 198)).decode("utf-8", "replace").encode()
    assert len([text for text in texts if text]) <= 3  # before, one that was already being sent, and the rest


async def test_an_error_after_the_first_token_is_an_event_and_not_a_done() -> None:
    source = ScriptedSource(fail_after=9, fail_with=Unavailable("the workers are being restarted"))
    answer = await http(app_over(source)).post(COMPLETIONS, json=completion(stream=True))
    assert answer.status_code == 200
    *before, last = events(answer.text)
    assert "".join(event["choices"][0]["text"] for event in before) == "bcdefghij"
    assert last["error"]["type"] == "service_unavailable_error"
    assert last["error"]["message"] == "the workers are being restarted"
    assert "[DONE]" not in answer.text


async def test_a_fault_in_the_middle_of_a_stream_tells_nothing(caplog: pytest.LogCaptureFixture) -> None:
    source = ScriptedSource(fail_after=9, fail_with=RuntimeError("secret"))
    answer = await http(app_over(source)).post(COMPLETIONS, json=completion(stream=True))
    assert events(answer.text)[-1]["error"]["code"] == "internal_error"
    assert "secret" not in answer.text
    assert "secret" in caplog.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("pause_after", [0, 5])
async def test_a_client_that_leaves_aborts_every_prompt(stream: bool, pause_after: int) -> None:
    source = ScriptedSource(pause_after=pause_after)
    body = completion(["a", "h"], n=2, stream=stream, max_tokens=100)
    exchange = Exchange(app_over(source), COMPLETIONS, body)
    await exchange.until(lambda: len(source.running) == 2)
    if stream and pause_after:
        await exchange.until(lambda: exchange.status == 200)
    exchange.hang_up()
    await exchange.finish()
    assert source.running == {}
    assert sorted(source.aborted) == sorted(request.request_id for request in source.requests)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_cancelled_handler_aborts(stream: bool) -> None:
    """As Serve does when its proxy sees the client leave."""
    source = ScriptedSource(pause_after=3)
    exchange = Exchange(app_over(source), COMPLETIONS, completion(stream=stream))
    await exchange.until(lambda: len(source.running) == 1)
    exchange.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await exchange.task
    assert len(source.aborted) == 1


async def test_a_server_that_tells_of_a_gone_client_by_an_error(caplog: pytest.LogCaptureFixture) -> None:
    source = ScriptedSource()
    exchange = Exchange(app_over(source), COMPLETIONS, completion(stream=True, max_tokens=100))
    exchange.break_after = 5
    await exchange.finish()
    assert len(source.aborted) == 1
    assert caplog.text == ""


@pytest.mark.parametrize("stop", [["klmnop"], ["lm", "zzz"], ["aab"], []])
async def test_stop_strings_streamed_and_whole(stop: list[str]) -> None:
    client = http(app_over(ScriptedSource()))
    body = completion("a", max_tokens=20, stop=stop)
    whole = (await client.post(COMPLETIONS, json=body)).json()
    streamed = events((await client.post(COMPLETIONS, json=body | {"stream": True})).text)[:-1]
    text = "".join(event["choices"][0]["text"] for event in streamed)
    assert text == whole["choices"][0]["text"]
    last = streamed[-1]["choices"][0]
    for field in ("finish_reason", "stop_reason"):
        assert last[field] == whole["choices"][0][field]
    matched = [string for string in stop if string in "bcdefghijklmnopqrstu"]
    assert last["stop_reason"] == (matched[0] if matched else None)
    assert not any(string in text for string in matched)


async def test_other_streams_do_not_notice_a_refusal() -> None:
    source = ScriptedSource(pause_after=2)
    app = app_over(source)
    neighbour = Exchange(app, COMPLETIONS, completion(stream=True, max_tokens=10))
    await neighbour.until(lambda: neighbour.status == 200)
    prompts: tuple[Any, ...] = ("", [""], [], [[]], [["a"]], [-1], "x" * 300)
    for prompt in prompts:
        assert (await http(app).post(COMPLETIONS, json=completion(prompt))).status_code == 400
    source.resume.set()
    await neighbour.finish()
    assert "".join(event["choices"][0]["text"] for event in events(neighbour.text)[:-1]) == "bcdefghijk"
