"""`Client`, `AsyncClient` and `LLM` against real ranks."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray

from cluster.client import AsyncClient, Client
from cluster.errors import ContextOverflow, InvalidRequest, Unavailable
from cluster.generation import FinishReason, RequestOptions, SamplingParams
from cluster.llm import LLM
from tests.system.conftest import Served, counted
from tests.system.processes import wait_until

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]  # the first one starts Ray

PROJECT = Path(__file__).resolve().parents[2]


def test_generate_chat_and_stream(served: Served) -> None:
    completion = served.client.generate("abc", SamplingParams(max_tokens=10))
    answer = served.client.chat([{"role": "user", "content": "count"}], SamplingParams(max_tokens=10, n=2))
    deltas = list(served.client.stream([97, 98, 99], SamplingParams(max_tokens=10)))

    assert completion.text == counted("c", 10)
    assert [choice.text for choice in answer.choices] == [counted(" ", 10)] * 2
    assert "".join(delta.text for delta in deltas) == counted("c", 10)
    assert deltas[-1].finish_reason is FinishReason.LENGTH


def test_leaving_the_loop_cancels(served: Served) -> None:
    aborted = served.stats().finished[FinishReason.ABORT]

    for _ in served.client.stream("abc", SamplingParams(max_tokens=3000)):
        break

    wait_until(lambda: served.stats().finished[FinishReason.ABORT] == aborted + 1, "the request is aborted")
    assert served.stats().running == 0


async def test_the_same_on_an_event_loop(served: Served) -> None:
    client = AsyncClient.connect()
    aborted = (await asyncio.to_thread(served.stats)).finished[FinishReason.ABORT]

    completion = await client.generate("abc", SamplingParams(max_tokens=10))
    stream = client.stream_chat([{"role": "user", "content": "count"}], SamplingParams(max_tokens=3000))
    first = await anext(stream)
    await stream.aclose()

    assert completion.text == counted("c", 10)
    assert counted(" ", 3000).startswith(first.text)
    await asyncio.to_thread(
        wait_until, lambda: served.stats().finished[FinishReason.ABORT] == aborted + 1, "the request is aborted"
    )


def test_errors_are_our_own(served: Served) -> None:
    with pytest.raises(InvalidRequest, match="prompt must have at least one token") as caught:
        served.client.generate("")
    assert type(caught.value) is InvalidRequest
    assert caught.value.field == "prompt"
    with pytest.raises(ContextOverflow, match="maximum context length"):
        list(served.client.stream("x" * 5000))
    with pytest.raises(Unavailable, match="no application 'absent'"):
        Client.connect("absent")


def test_every_face_gives_the_same(served: Served, counter_path: Path) -> None:
    """Over HTTP, through the handle and offline: one owner of text and stops, one engine's logits."""
    bodies: list[dict[str, Any]] = [
        {"stop": ["jkl"]},
        {"stop": ["jkl"], "include_stop_str_in_output": True, "logprobs": 2},
        {"stop": ["jkl"], "min_tokens": 12},
        {"stop_token_ids": [106]},
        {"stop_token_ids": [106], "include_stop_str_in_output": True},
        {"bad_words": ["hi"], "temperature": 0, "logprobs": 0},
        {"allowed_token_ids": [97, 98], "repetition_penalty": 1.5, "seed": 5},
        {"logit_bias": {"120": 100}, "temperature": 0, "priority": 3, "cache_salt": "me"},
        {"min_p": 0.5, "presence_penalty": 1, "frequency_penalty": 0.5},
    ]
    with LLM(str(counter_path), device="cpu", kv_cache_memory="16MiB") as llm:
        for extra in bodies:
            body = {"max_tokens": 30, **extra}
            json = {"model": "counter", "prompt": "abc", **body}
            answer = httpx.post(f"{served.url}/v1/completions", json=json, timeout=60)
            over_http = answer.json()["choices"][0]
            sampling, options = _in_python(body)
            for choice in (
                served.client.generate("abc", sampling, options).choices[0],
                llm.generate("abc", sampling, options)[0].choices[0],
            ):
                assert choice.text == over_http["text"], body
                assert choice.finish_reason == over_http["finish_reason"], body
                assert choice.stop_reason == over_http["stop_reason"], body
                scores = [logprob.logprob for logprob in choice.logprobs]
                assert scores == pytest.approx((over_http["logprobs"] or {"token_logprobs": []})["token_logprobs"])
            streamed = served.client.stream("abc", sampling, options)
            assert "".join(delta.text for delta in streamed) == over_http["text"], body


def _in_python(body: dict[str, Any]) -> tuple[SamplingParams, RequestOptions]:
    """The parameters of a body in the types of `SamplingParams`."""
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in body.items()
    }
    if "logit_bias" in fields:
        fields["logit_bias"] = tuple((int(key), bias) for key, bias in fields["logit_bias"].items())
    options: dict[str, Any] = {name: fields.pop(name) for name in ("priority", "cache_salt") if name in fields}
    return SamplingParams(**fields), RequestOptions(**options)


def test_any_process_of_the_cluster_can_connect_without_torch(served: Served) -> None:
    program = (
        "import sys\n"
        "from shardserve import Client, SamplingParams\n"
        "client = Client.connect(address=sys.argv[1])\n"
        "print(client.generate('abc', SamplingParams(max_tokens=5)).text, 'torch' in sys.modules)\n"
    )
    address = ray.get_runtime_context().gcs_address
    done = subprocess.run(
        [sys.executable, "-c", program, address],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "defgh False\n", done.stderr
