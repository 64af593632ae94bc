"""Log-probabilities and echo over HTTP: OpenAI's shapes, read by the official client, streamed as whole."""

import re
from typing import Any

import openai
import pytest
from openai.types.chat.chat_completion import ChoiceLogprobs
from openai.types.completion_choice import Logprobs

from cluster.generation import TokenLogprob
from cluster.ingress.logprobs import ScoredToken, completion_logprobs, echo_of
from tests.cluster.ingress.served import (
    CHAT,
    COMPLETIONS,
    MODEL,
    app_over,
    chat,
    completion,
    events,
    http,
    openai_client,
)
from tests.fakes import scripted_source
from tests.fakes.byte_tokenizer import BOS_ID, EOS_ID, ByteTokenizer
from tests.fakes.scripted_source import ScriptedSource, logprob_of, says

TEXT = "h\u00e9llo \U0001f642"
MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("top_logprobs", [None, 0, 3])
async def test_chat_has_one_entry_for_each_token_of_the_text(top_logprobs: int | None) -> None:
    client = openai_client(app_over(ScriptedSource(says(TEXT))))
    extra: dict[str, Any] = {} if top_logprobs is None else {"top_logprobs": top_logprobs}
    answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES, logprobs=True, **extra)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    ChoiceLogprobs.model_validate(logprobs.model_dump(), strict=True)
    assert b"".join(bytes(token.bytes or []) for token in logprobs.content) == TEXT.encode()
    for token, byte in zip(logprobs.content, TEXT.encode(), strict=True):
        expected = logprob_of(byte, top_logprobs or 0)
        assert token.token == (chr(byte) if byte < 128 else f"\\x{byte:02x}")
        assert token.logprob == expected.logprob
        assert [top.logprob for top in token.top_logprobs] == [logprob for _, logprob in expected.top]
        assert [top.bytes for top in token.top_logprobs] == [
            list(ByteTokenizer().token_bytes(token_id)) for token_id, _ in expected.top
        ]


async def test_no_logprobs_where_none_are_asked_for() -> None:
    client = openai_client(app_over(ScriptedSource()))
    plain = await client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert plain.choices[0].logprobs is None
    off = await client.chat.completions.create(model=MODEL, messages=MESSAGES, logprobs=False)
    assert off.choices[0].logprobs is None


@pytest.mark.parametrize("num_top", [0, 5])
async def test_completions_have_parallel_lists(num_top: int) -> None:
    client = openai_client(app_over(ScriptedSource(says(TEXT))))
    answer = await client.completions.create(model=MODEL, prompt="a", logprobs=num_top)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    Logprobs.model_validate(logprobs.model_dump(), strict=True)
    assert (logprobs.tokens or [])[:3] == ["h", "bytes:\\xc3", "bytes:\\xa9"]
    assert logprobs.text_offset == [0, 1, 1, 2, 3, 4, 5, 6, 6, 6, 6]
    assert logprobs.token_logprobs == [logprob_of(byte, 0).logprob for byte in TEXT.encode()]
    tops = logprobs.top_logprobs or []
    for name, value, top in zip(logprobs.tokens or [], logprobs.token_logprobs or [], tops, strict=True):
        assert top[name] == value, "the chosen token is among its alternatives"
        assert num_top <= len(top) + 1
        assert len(top) <= num_top + 1


@pytest.mark.parametrize("burst", [1, 2, 5, 100])
@pytest.mark.parametrize("stop", [[], ["lo"], ["\U0001f642"], ["nope"]])
@pytest.mark.parametrize("include", [False, True])
async def test_streamed_logprobs_are_those_of_the_whole(burst: int, stop: list[str], include: bool) -> None:
    client = http(app_over(ScriptedSource(says(TEXT), burst=burst)))
    options: dict[str, Any] = {"stop": stop, "include_stop_str_in_output": include}

    whole = (await client.post(CHAT, json=chat(logprobs=True, top_logprobs=2, **options))).json()["choices"][0]
    body = chat(logprobs=True, top_logprobs=2, stream=True, **options)
    content, text = [], ""
    for event in events((await client.post(CHAT, json=body)).text)[:-1]:
        text += event["choices"][0]["delta"].get("content", "")
        content += (event["choices"][0]["logprobs"] or {"content": []})["content"]
    assert text == whole["message"]["content"]
    assert content == whole["logprobs"]["content"]
    assert bytes(byte for token in content for byte in token["bytes"]).decode() == text

    whole = (await client.post(COMPLETIONS, json=completion(logprobs=2, echo=True, **options))).json()["choices"][
        0
    ]
    body = completion(logprobs=2, echo=True, stream=True, **options)
    lists: dict[str, list[Any]] = {name: [] for name in whole["logprobs"]}
    text = ""
    for event in events((await client.post(COMPLETIONS, json=body)).text)[:-1]:
        text += event["choices"][0]["text"]
        for name, values in (event["choices"][0]["logprobs"] or {}).items():
            lists[name] += values
    assert text == whole["text"]
    assert lists == whole["logprobs"]


@pytest.mark.parametrize("prompt", ["\u00e9b", list("\u00e9b".encode())])
async def test_an_echo_has_the_prompt_and_its_logprobs_before_the_text(prompt: Any) -> None:
    source = ScriptedSource(says("c"))
    answer = (
        await http(app_over(source)).post(COMPLETIONS, json=completion(prompt, echo=True, logprobs=1))
    ).json()
    choice = answer["choices"][0]
    assert choice["text"] == "\u00e9bc"
    assert choice["logprobs"]["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "b", "c"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 2]
    first, *others = choice["logprobs"]["token_logprobs"]
    assert first is None
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert others == [logprob_of(byte, 0).logprob for byte in b"\xa9bc"]
    assert answer["usage"]["completion_tokens"] == 2, "the prompt is not billed as output"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_without_logprobs_is_text_alone(stream: bool) -> None:
    source = ScriptedSource()
    body = completion(["ab", "h"], n=2, max_tokens=2, echo=True, stream=stream)
    answer = await http(app_over(source)).post(COMPLETIONS, json=body)
    pieces = events(answer.text)[:-1] if stream else [answer.json()]
    texts = dict.fromkeys(range(4), "")
    for choice in (choice for piece in pieces for choice in piece["choices"]):
        texts[choice["index"]] += choice["text"]
        assert choice["logprobs"] is None
    assert list(texts.values()) == ["abcd", "abde", "hij", "hjk"]
    assert all(request.sampling.prompt_logprobs is None for request in source.requests)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_can_be_scored_without_generating(stream: bool) -> None:
    """Nothing is generated, and nobody pays for it."""
    source = ScriptedSource()
    usage = {"stream_options": {"include_usage": True}} if stream else {}
    body = completion("abc", echo=True, logprobs=1, max_tokens=0, stream=stream, **usage)
    answer = await http(app_over(source)).post(COMPLETIONS, json=body)
    pieces = events(answer.text)[:-1] if stream else [answer.json()]
    choices = [choice for piece in pieces for choice in piece["choices"]]
    assert "".join(choice["text"] for choice in choices) == "abc"
    (logprobs,) = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    assert logprobs["tokens"] == ["a", "b", "c"]
    assert logprobs["token_logprobs"] == [None, *(logprob_of(byte, 0).logprob for byte in b"bc")]
    assert choices[-1]["finish_reason"] == "length"
    assert pieces[-1]["usage"]["completion_tokens"] == 0
    assert pieces[-1]["usage"]["total_tokens"] == 3
    assert source.requests[0].sampling.max_tokens == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_cached_tokens_of_each_prompt_count_once(stream: bool) -> None:
    usage = {"stream_options": {"include_usage": True}} if stream else {}
    body = completion(["abc", "def"], n=3, max_tokens=2, stream=stream, **usage)
    answer = await http(app_over(ScriptedSource(num_cached_tokens=2))).post(COMPLETIONS, json=body)
    last = events(answer.text)[-2] if stream else answer.json()
    assert last["usage"] == {
        "prompt_tokens": 6,
        "completion_tokens": 12,
        "total_tokens": 18,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


def test_special_tokens_are_named_and_minus_infinity_is_a_number() -> None:
    scored = TokenLogprob(97, -1.0, ((EOS_ID, -0.5), (97, -1.0), (98, float("-inf"))))
    rendered = completion_logprobs([ScoredToken(97, 0, scored)], ByteTokenizer())
    assert rendered["top_logprobs"] == [{"<eos>": -0.5, "a": -1.0, "b": -9999.0}]


@pytest.mark.parametrize("number", [float("-inf"), float("nan"), -1e30])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat(logprobs=True, top_logprobs=1, max_tokens=2)),
        (COMPLETIONS, completion("abc", logprobs=1, echo=True, max_tokens=2)),
    ],
)
async def test_what_json_lacks_is_a_number_in_every_answer(
    path: str, body: dict[str, Any], stream: bool, number: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a model that masks its own logits, to which a prompt may have shown a token all the same."""
    masked = TokenLogprob(97, number, ((97, number),))
    monkeypatch.setattr(scripted_source, "logprob_of", lambda token_id, num_top: masked)
    answer = await http(app_over(ScriptedSource())).post(path, json=body | {"stream": stream})
    assert answer.status_code == 200
    assert not re.search(r"NaN|Infinity", answer.text)
    assert "-9999.0" in answer.text


def test_two_tokens_of_one_name_keep_the_likelier_number() -> None:
    class Twins(ByteTokenizer):
        def token_bytes(self, token_id: int) -> bytes:
            return b"x"

    rendered = completion_logprobs([ScoredToken(2, 0, TokenLogprob(2, -3.0, ((1, -1.0),)))], Twins())
    assert rendered["top_logprobs"] == [{"x": -1.0}]


def test_where_the_tokens_of_an_echo_begin() -> None:
    tokenizer = ByteTokenizer()
    added = echo_of("ab", (BOS_ID, 97, 98), tokenizer)
    assert (added.text, added.offsets) == ("ab", (0, 0, 1))
    spelled = echo_of("a<end>b", tokenizer.encode("a<end>b", add_special_tokens=False), tokenizer)
    assert (spelled.text, spelled.offsets) == ("a<end>b", (0, 1, 6))
    dummy_prefix = echo_of("ab", (BOS_ID, *b" ab"), tokenizer)
    assert dummy_prefix.offsets == (0, 0, 0, 1)
