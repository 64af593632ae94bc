"""What is refused, with which status and which parameter; byte for byte the same with and without `stream`."""

import json
from typing import Any

import pytest

from cluster.errors import GenerationFailed, Overloaded, Unavailable
from cluster.generation import SamplingParams
from cluster.ingress.admission import Limits
from tests.cluster.ingress.served import CHAT, COMPLETIONS, MODEL, app_over, chat, completion, http
from tests.fakes.scripted_source import ScriptedSource

REFUSED = [
    # empty prompts (a tokenizer without BOS)
    (COMPLETIONS, completion(""), "prompt"),
    (COMPLETIONS, completion([""]), "prompt"),
    (COMPLETIONS, completion([]), "prompt"),
    (COMPLETIONS, completion([[]]), "prompt"),
    (COMPLETIONS, completion([["a"]]), "prompt"),
    (COMPLETIONS, completion(["a", ""]), "prompt[1]"),
    (COMPLETIONS, completion([1, "a"]), "prompt"),
    (COMPLETIONS, completion([True]), "prompt"),
    (COMPLETIONS, completion(None), "prompt"),
    (COMPLETIONS, completion({}), "prompt"),
    (COMPLETIONS, {"model": MODEL}, "prompt"),
    (CHAT, {"model": MODEL}, "messages"),
    (CHAT, chat() | {"messages": []}, "messages"),
    # too long
    (COMPLETIONS, completion("x" * 256), "prompt"),
    (COMPLETIONS, completion("x" * 200, max_tokens=57), "max_tokens"),
    (CHAT, chat("x" * 257), "messages"),
    (COMPLETIONS, completion("x" * 500_000), "prompt"),  # too long to be worth encoding
    (COMPLETIONS, completion(["x", "x" * 500_000]), "prompt[1]"),
    (CHAT, chat("x" * 500_000), "messages"),
    (CHAT, chat("x", max_tokens=256), "max_tokens"),
    # outside the vocabulary
    *((COMPLETIONS, completion([1, token]), "prompt") for token in (-1, 260, 2**31, 2**70)),
    *(
        (CHAT, chat() | {name: values}, name)
        for token in (-1, 260, 2**31)
        for name, values in (
            ("stop_token_ids", [token]),
            ("allowed_token_ids", [1, token]),
            ("logit_bias", {"1": 1, str(token): 1}),
        )
    ),
    (CHAT, chat(stop_token_ids=[2**70]), "stop_token_ids[0]"),
    (CHAT, chat(allowed_token_ids=[2**70]), "allowed_token_ids[0]"),
    # wrong types and values
    (CHAT, chat(temperature="1"), "temperature"),
    (CHAT, chat(temperature=2.5), "temperature"),
    (CHAT, chat(temperature=-0.1), "temperature"),
    (CHAT, chat(top_p=0), "top_p"),
    (CHAT, chat(top_p=1.1), "top_p"),
    (CHAT, chat(top_k=-2), "top_k"),
    (CHAT, chat(top_k=1.5), "top_k"),
    (CHAT, chat(seed=-1), "seed"),
    (CHAT, chat(seed=2**64), "seed"),
    (CHAT, chat(max_tokens=0), "max_tokens"),
    (CHAT, chat(max_tokens=True), "max_tokens"),
    (CHAT, chat(max_tokens=10**300), "max_tokens"),
    (CHAT, chat(max_completion_tokens=0), "max_completion_tokens"),
    (CHAT, chat(max_completion_tokens=5, max_tokens=6), "max_completion_tokens"),
    (CHAT, chat(n=0), "n"),
    (CHAT, chat(n=129), "n"),
    (CHAT, chat(stop=""), "stop"),
    (CHAT, chat(stop=["a", ""]), "stop"),
    (CHAT, chat(stop=["x"] * 17), "stop"),
    (CHAT, chat(stop="x" * 4097), "stop"),
    (CHAT, chat(bad_words=["x" * 4097]), "bad_words"),
    (CHAT, chat() | {"x" * 1_000_000: 1}, "x" * 60 + "..."),
    (CHAT, chat(stop=[1]), "stop[0]"),
    (CHAT, chat(stop=5), "stop"),
    (CHAT, chat(min_p=-0.1), "min_p"),
    (CHAT, chat(min_p=1.1), "min_p"),
    (CHAT, chat(min_p="0.1"), "min_p"),
    (CHAT, chat(repetition_penalty=0), "repetition_penalty"),
    (CHAT, chat(repetition_penalty=11), "repetition_penalty"),
    (CHAT, chat(presence_penalty=2.5), "presence_penalty"),
    (CHAT, chat(presence_penalty=False), "presence_penalty"),
    (CHAT, chat(frequency_penalty=-2.5), "frequency_penalty"),
    (CHAT, chat(min_tokens=-1), "min_tokens"),
    (CHAT, chat(min_tokens=6, max_tokens=5), "min_tokens"),
    (COMPLETIONS, completion(min_tokens=17), "min_tokens"),  # more than the default of max_tokens
    (CHAT, chat(include_stop_str_in_output=1), "include_stop_str_in_output"),
    (CHAT, chat(logit_bias=[1]), "logit_bias"),
    (CHAT, chat(logit_bias={"a": 1}), "logit_bias"),
    (CHAT, chat(logit_bias={"05": 1}), "logit_bias"),
    (CHAT, chat(logit_bias={"9" * 5000: 1}), "logit_bias"),
    (CHAT, chat(logit_bias={"5": 101}), "logit_bias"),
    (CHAT, chat(logit_bias={"5": -100.5}), "logit_bias"),
    (CHAT, chat(logit_bias={"5": True}), "logit_bias"),
    (CHAT, chat(logit_bias={"5": None}), "logit_bias"),
    (CHAT, chat(logit_bias={str(token): 1 for token in range(1025)}), "logit_bias"),
    (CHAT, chat(allowed_token_ids=[]), "allowed_token_ids"),
    (CHAT, chat(allowed_token_ids=["1"]), "allowed_token_ids[0]"),
    (CHAT, chat(bad_words=[""]), "bad_words"),
    (CHAT, chat(bad_words="x"), "bad_words"),
    (CHAT, chat(bad_words=["x"] * 129), "bad_words"),
    (CHAT, chat(priority="high"), "priority"),
    (CHAT, chat(priority=2**31), "priority"),
    (CHAT, chat(priority=1), "priority"),  # the operator has not allowed it
    (COMPLETIONS, completion(priority=-1), "priority"),
    (CHAT, chat(cache_salt=""), "cache_salt"),
    (CHAT, chat(cache_salt=5), "cache_salt"),
    (CHAT, chat(cache_salt="x" * 257), "cache_salt"),
    # log-probabilities
    (CHAT, chat(logprobs=1), "logprobs"),
    (CHAT, chat(top_logprobs=2), "top_logprobs"),
    (CHAT, chat(logprobs=False, top_logprobs=2), "top_logprobs"),
    (CHAT, chat(logprobs=True, top_logprobs=21), "top_logprobs"),
    (CHAT, chat(top_logprobs=21), "top_logprobs"),
    (CHAT, chat(logprobs=True, top_logprobs=-1), "top_logprobs"),
    (CHAT, chat(logprobs=True, top_logprobs=True), "top_logprobs"),
    (COMPLETIONS, completion(logprobs=0.5), "logprobs"),
    (COMPLETIONS, completion(logprobs=21), "logprobs"),
    (COMPLETIONS, completion(logprobs=-1), "logprobs"),
    (COMPLETIONS, completion(logprobs=True), "logprobs"),
    (COMPLETIONS, completion(top_logprobs=1), "top_logprobs"),
    (COMPLETIONS, completion(echo=1), "echo"),
    (COMPLETIONS, completion(max_tokens=0), "max_tokens"),
    (COMPLETIONS, completion(max_tokens=-1, echo=True), "max_tokens"),
    (CHAT, chat(echo=True), "echo"),
    (CHAT, chat(stream_options={"include_usage": 1}, stream=True), "stream_options.include_usage"),
    (CHAT, chat(stream_options={"other": True}, stream=True), "stream_options.other"),
    (CHAT, chat() | {"model": 5}, "model"),
    (CHAT, chat() | {"messages": "hi"}, "messages"),
    (CHAT, chat() | {"messages": ["hi"]}, "messages[0]"),
    (CHAT, chat() | {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHAT, chat() | {"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    (CHAT, chat() | {"messages": [{"role": "robot", "content": ""}]}, "messages[0].role"),
    (CHAT, chat() | {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    (CHAT, chat() | {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content"),
    # not supported yet, and unknown
    (CHAT, chat() | {"messages": [{"role": "user", "content": "", "name": "Bo"}]}, "messages[0].name"),
    (COMPLETIONS, completion(best_of=True), "best_of"),
    (COMPLETIONS, completion(prompt_logprobs=1), "prompt_logprobs"),
    (COMPLETIONS, completion(suffix="x"), "suffix"),
    (COMPLETIONS, completion(best_of=2), "best_of"),
    (CHAT, chat(tools=[{"type": "function"}]), "tools"),
    (CHAT, chat(tool_choice="required"), "tool_choice"),
    (CHAT, chat(response_format={"type": "json_object"}), "response_format"),
    (CHAT, chat(reasoning_effort="high"), "reasoning_effort"),
    (CHAT, chat(guided_json={}), "guided_json"),
    (CHAT, chat(tempurature=1), "tempurature"),
    (CHAT, chat(max_completion_token=1), "max_completion_token"),
    (COMPLETIONS, completion(messages=[]), "messages"),
    # too much for one request
    (COMPLETIONS, completion(["a"] * 65), "prompt"),
    (COMPLETIONS, completion(["a"] * 10, n=13), "n"),
]


@pytest.mark.parametrize(("path", "body", "param"), REFUSED)
async def test_refused_alike_with_and_without_stream(path: str, body: dict[str, Any], param: str) -> None:
    source = ScriptedSource()
    client = http(app_over(source))
    plain = await client.post(
        path,
        json={name: body[name] for name in body if name != "stream_options"}
        | ({"stream": True, "stream_options": body["stream_options"]} if "stream_options" in body else {}),
    )
    streamed = await client.post(path, json=body | {"stream": True})
    assert plain.status_code == 400, plain.text
    assert (plain.status_code, plain.content) == (streamed.status_code, streamed.content)
    error = plain.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert set(error) == {"message", "type", "param", "code"}
    assert source.requests == [], "the engine has seen a request that cannot be served"


ACCEPTED = [
    (CHAT, chat(logprobs=False, top_logprobs=None, presence_penalty=0, frequency_penalty=0.0, logit_bias={})),
    (CHAT, chat(tools=[], tool_choice="none", parallel_tool_calls=True, response_format={"type": "text"})),
    (CHAT, chat(user="me", store=False, metadata={}, service_tier="auto", modalities=["text"], min_p=0, top_k=-1)),
    (CHAT, chat(temperature=None, top_p=None, n=None, stop=None, seed=None, stream=None, max_tokens=None)),
    (CHAT, chat(temperature=0, top_p=1, top_k=5, stop="x", stop_token_ids=[1], ignore_eos=True, n=2, seed=0)),
    (CHAT, chat(max_completion_tokens=5, max_tokens=5, stop=["x", "y"])),
    (COMPLETIONS, completion(logprobs=None, echo=False, best_of=1, suffix=None, user="me")),
    (COMPLETIONS, completion(logprobs=False)),
    (CHAT, chat(logprobs=False, top_logprobs=0)),
    (COMPLETIONS, completion("x" * 250)),  # the default of 16 gives way to what is left
    (CHAT, chat() | {"messages": [{"role": "developer", "content": [{"type": "text", "text": "a"}]},
                                  {"role": "assistant", "content": "b", "refusal": None, "tool_calls": None},
                                  {"role": "user", "content": ""}]}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), ACCEPTED)
async def test_what_clients_send_as_a_matter_of_course_is_taken(path: str, body: dict[str, Any]) -> None:
    answer = await http(app_over(ScriptedSource())).post(path, json=body)
    assert answer.status_code == 200, answer.text


async def test_every_sampling_parameter_reaches_the_engine() -> None:
    source = ScriptedSource()
    body: dict[str, Any] = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.25, "repetition_penalty": 1.5,
        "presence_penalty": -1, "frequency_penalty": 2, "logit_bias": {"5": -100, "259": 0.5}, "bad_words": ["no"],
        "allowed_token_ids": [1, 2], "seed": 3, "max_tokens": 9, "min_tokens": 4, "stop": ["x"],
        "stop_token_ids": [9], "include_stop_str_in_output": True, "ignore_eos": True, "n": 2,
    }  # fmt: skip
    request_options: dict[str, Any] = {"priority": -7, "cache_salt": "me"}
    client = http(app_over(source, limits=Limits(allow_priority=True)))
    await client.post(CHAT, json=chat(**body, **request_options, logprobs=True, top_logprobs=6))
    await client.post(COMPLETIONS, json=completion(**body, **request_options, logprobs=6))
    values = body | {
        "logit_bias": ((5, -100.0), (259, 0.5)), "bad_words": ("no",), "allowed_token_ids": (1, 2),
        "stop": ("x",), "stop_token_ids": (9,), "logprobs": 6,
    }  # fmt: skip
    for request in source.requests:
        assert request.sampling == SamplingParams(**values)
        assert (request.priority, request.cache_salt) == (-7, "me")
        assert request.bad_words_ids == ((110, 111),)
    assert len(source.requests) == 2


async def test_stream_options_need_a_stream() -> None:
    answer = await http(app_over(ScriptedSource())).post(CHAT, json=chat(stream_options={"include_usage": True}))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream_options")


@pytest.mark.parametrize(
    ("body", "part"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[1]", "must be an object"),
        (b"null", "must be an object"),
        (b'{"model": {}, "prompt": "a"}', "not an object of 0"),
        (b'{"model": "tiny", "prompt": [1, "a"]}', "'a' at position 1"),
        (b'{"model": "tiny", "prompt": [1, 2, [3]]}', "a list of 1 at position 2"),
        (b'{"model": "tiny", "prompt": ["a", 2]}', "2 at position 1"),
        (b'{"model": "\xff"}', "not valid JSON"),
        (b'{"model": "\\ud800"}', "not valid JSON"),
        (b'{"model": "tiny", "prompt": "a", "temperature": NaN}', "finite"),
        (b'{"model": "tiny", "prompt": "a", "temperature": 1e999}', "finite"),
        (b'{"model": "tiny", "prompt": "a", "min_p": NaN}', "min_p"),
        (b'{"model": "tiny", "prompt": "a", "n": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'{"model": "tiny", "prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}", "recursion"),
        (b"\x80\x04pickle", "not valid JSON"),
    ],
)
async def test_bodies_that_are_no_requests(body: bytes, part: str) -> None:
    answer = await http(app_over(ScriptedSource())).post(
        COMPLETIONS, content=body, headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400
    assert part in answer.json()["error"]["message"]
    assert len(answer.content) < 500, "a wrong value is not sent back whole"


async def test_a_byte_order_mark_is_left_out() -> None:
    body = b"\xef\xbb\xbf" + json.dumps(completion()).encode()
    answer = await http(app_over(ScriptedSource())).post(
        COMPLETIONS, content=body, headers={"content-type": "application/json"}
    )
    assert answer.status_code == 200


async def test_content_type_and_size() -> None:
    client = http(app_over(ScriptedSource(), limits=Limits(max_body_bytes=100)))
    form = await client.post(COMPLETIONS, data={"model": MODEL})
    assert (form.status_code, form.json()["error"]["code"]) == (415, "unsupported_media_type")
    large = await client.post(COMPLETIONS, json=completion("x" * 200))
    assert (large.status_code, large.json()["error"]["code"]) == (413, "body_too_large")
    assert "100 bytes" in large.json()["error"]["message"]
    bare = await client.post(COMPLETIONS, content=json.dumps(completion()).encode())
    assert bare.status_code == 200, "a missing content type is taken for JSON"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("source", "status", "error_type", "retry_after"),
    [
        (ScriptedSource(refuse_with=Overloaded("512 requests are waiting", 1.2)), 429, "rate_limit_error", "2"),
        (ScriptedSource(refuse_with=Unavailable("recovering")), 503, "service_unavailable_error", "5"),
        (ScriptedSource(fail_after=0), 500, "server_error", None),
        (ScriptedSource(fail_after=0, fail_with=Unavailable("lost", 0.1)), 503, "service_unavailable_error", "1"),
        (ScriptedSource(refuse_with=GenerationFailed("no")), 500, "server_error", None),
    ],
)
async def test_what_the_engine_refuses_has_its_status_either_way(
    source: ScriptedSource, status: int, error_type: str, retry_after: str | None, stream: bool
) -> None:
    answer = await http(app_over(source)).post(CHAT, json=chat(stream=stream))
    assert answer.status_code == status
    assert answer.json()["error"]["type"] == error_type
    assert answer.headers.get("retry-after") == retry_after


@pytest.mark.parametrize("stream", [False, True])
async def test_one_refused_prompt_of_several_refuses_the_request_and_aborts_the_rest(stream: bool) -> None:
    source = ScriptedSource(
        refuse_with=Overloaded("full"), refuse_when=lambda request: request.prompt_token_ids == (99,)
    )
    answer = await http(app_over(source)).post(COMPLETIONS, json=completion(["a", "b", "c"], stream=stream))
    assert answer.status_code == 429
    assert len(source.requests) == 3
    assert source.running == {}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_fault_of_ours_is_logged_and_tells_nothing(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    source = ScriptedSource(refuse_with=RuntimeError("secret"))  # type: ignore[arg-type]
    answer = await http(app_over(source)).post(CHAT, json=chat(stream=stream))
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert "secret" not in answer.text
    assert "secret" in caplog.text
