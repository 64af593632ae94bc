"""The official client against the app: its own pydantic models check our shapes."""

import openai
import pytest

from cluster.errors import Overloaded
from tests.cluster.ingress.served import MODEL, app_over, openai_client
from tests.fakes.byte_tokenizer import BOS_ID
from tests.fakes.scripted_source import ScriptedSource, says

TEXT = "h\u00e9llo \U0001f642 \u6f22\u5b57 \U0001f469\u200d\U0001f469\u200d\U0001f467"
MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]


async def test_chat() -> None:
    source = ScriptedSource(says(TEXT))
    answer = await openai_client(app_over(source)).chat.completions.create(model=MODEL, messages=MESSAGES, seed=7)
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    (request,) = source.requests
    assert request.sampling.seed == 7
    assert request.sampling.max_tokens == 256 - len(request.prompt_token_ids)
    assert request.prompt_token_ids.count(BOS_ID) == 1
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(request.prompt_token_ids)
    assert answer.usage.completion_tokens == len(TEXT.encode()) + 1
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


async def test_chat_streamed() -> None:
    client = openai_client(app_over(ScriptedSource(says(TEXT))))
    stream = await client.chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(texts) == TEXT
    assert not any("\ufffd" in text for text in texts)
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(TEXT.encode()) + 1
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


async def test_completions_of_several_prompts_are_indexed_prompt_by_prompt() -> None:
    client = openai_client(app_over(ScriptedSource()))
    answer = await client.completions.create(model=MODEL, prompt=["a", "h"], n=2, max_tokens=3)
    assert [(choice.index, choice.text) for choice in answer.choices] == [
        (0, "bcd"),
        (1, "cde"),
        (2, "ijk"),
        (3, "jkl"),
    ]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 12)


async def test_completions_streamed() -> None:
    client = openai_client(app_over(ScriptedSource()))
    texts = {0: "", 1: "", 2: "", 3: ""}
    ended = set()
    stream = await client.completions.create(model=MODEL, prompt=["a", "h"], n=2, max_tokens=3, stream=True)
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
        if chunk.choices[0].finish_reason is not None:
            ended.add(chunk.choices[0].index)
    assert texts == {0: "bcd", 1: "cde", 2: "ijk", 3: "jkl"}
    assert ended == {0, 1, 2, 3}


async def test_prompts_as_token_ids() -> None:
    client = openai_client(app_over(ScriptedSource()))
    answer = await client.completions.create(model=MODEL, prompt=[[97], [98, 99]], max_tokens=1)
    assert [choice.text for choice in answer.choices] == ["b", "d"]
    answer = await client.completions.create(model=MODEL, prompt=[97, 98], max_tokens=1)
    assert [choice.text for choice in answer.choices] == ["c"]


async def test_completions_give_16_tokens_by_default() -> None:
    source = ScriptedSource()
    await openai_client(app_over(source)).completions.create(model=MODEL, prompt="a")
    assert source.requests[0].sampling.max_tokens == 16


async def test_models() -> None:
    client = openai_client(app_over(ScriptedSource()))
    assert [model.id async for model in client.models.list()] == [MODEL]
    assert (await client.models.retrieve(MODEL)).owned_by == "shardserve"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other/model")


async def test_errors_are_the_clients_own_classes() -> None:
    client = openai_client(app_over(ScriptedSource(refuse_with=Overloaded("512 are waiting", 2.5))))
    with pytest.raises(openai.RateLimitError) as refusal:
        await client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert refusal.value.response.headers["retry-after"] == "3"
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="gpt-4", messages=MESSAGES)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as wrong:
        await client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=3)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        await client.completions.create(model=MODEL, prompt="x" * 300)
    assert long.value.code == "context_length_exceeded"


async def test_an_error_in_the_middle_of_a_stream_reaches_the_client() -> None:
    client = openai_client(app_over(ScriptedSource(fail_after=9)))
    stream = await client.completions.create(model=MODEL, prompt="a", stream=True)
    with pytest.raises(openai.APIError, match="rank 1 ended"):
        async for _ in stream:
            pass
