"""From a prompt to text over a `TokenSource`: what is submitted, what comes back, and what is ended early."""

import asyncio
from contextlib import aclosing

import pytest

from cluster.errors import GenerationFailed, InvalidRequest, Overloaded, Unavailable
from cluster.generation import FinishReason, SamplingParams, TextDelta
from cluster.text.chat_template import ChatTemplate
from cluster.text.completer import Completer
from tests.fakes.byte_tokenizer import CHAT_TEMPLATE, SPECIAL_TOKENS, ByteTokenizer
from tests.fakes.scripted_source import ScriptedSource, says


def completer(source: ScriptedSource) -> Completer:
    return Completer(ByteTokenizer(), ChatTemplate(CHAT_TEMPLATE, SPECIAL_TOKENS), source, max_model_len=256)


async def deltas(subject: Completer, sampling: SamplingParams) -> list[TextDelta]:
    request = await subject.prepare("r", "a", sampling)
    return [delta async for delta in subject.stream(request)]


@pytest.mark.parametrize("burst", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("stop", [(), ("lm",), ("gh", "klmnop"), ("nope",)])
async def test_streamed_equals_whole(burst: int, stop: tuple[str, ...]) -> None:
    sampling = SamplingParams(max_tokens=20, stop=stop)
    subject = completer(ScriptedSource(burst=burst))
    streamed = await deltas(subject, sampling)
    whole = await subject.complete(await subject.prepare("r", "a", sampling))
    assert "".join(delta.text for delta in streamed) == whole.text
    assert tuple(token for delta in streamed for token in delta.token_ids) == whole.choices[0].token_ids
    text = "bcdefghijklmnopqrstu"
    ends = [text.index(string) + len(string) for string in stop if string in text]
    assert whole.num_completion_tokens == min(ends, default=len(text))


async def test_a_stop_string_ends_its_choice_at_the_source_and_the_others_go_on() -> None:
    source = ScriptedSource(says("ab!cdefgh", "abcdefgh"))
    subject = completer(source)
    whole = await subject.complete(await subject.prepare("r", "x", SamplingParams(n=2, stop=("!",))))
    assert source.finished_choices == [("r", 0)]
    assert [choice.text for choice in whole.choices] == ["ab", "abcdefgh"]
    assert whole.choices[0].stop_reason == "!"
    assert whole.num_completion_tokens == len("ab!") + len("abcdefgh") + 1  # and EOS
    assert source.aborted == []


async def test_the_last_open_choice_ends_the_stream() -> None:
    source = ScriptedSource(says("ab!cdefgh"))
    await deltas(completer(source), SamplingParams(stop=("!",)))
    assert source.finished_choices == [("r", 0)]
    assert source.running == {}
    assert source.aborted == []


async def test_a_source_that_cannot_end_a_choice_early_does_not_spoil_the_text() -> None:
    class Stubborn(ScriptedSource):
        async def finish_choice(self, request_id: str, choice: int) -> None:
            raise Unavailable("no driver")

    streamed = await deltas(completer(Stubborn(says("ab!cd"))), SamplingParams(stop=("!",)))
    assert "".join(delta.text for delta in streamed) == "ab"
    assert streamed[-1].finish_reason is FinishReason.STOP


async def test_leaving_the_stream_aborts() -> None:
    source = ScriptedSource()
    subject = completer(source)
    async with aclosing(subject.stream(await subject.prepare("r", "a", SamplingParams()))) as stream:
        await anext(stream)
    assert source.aborted == ["r"]


async def test_cancelling_a_completion_aborts() -> None:
    source = ScriptedSource(pause_after=2)
    subject = completer(source)
    task = asyncio.create_task(subject.complete(await subject.prepare("r", "a", SamplingParams())))
    while "r" not in source.running:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert source.aborted == ["r"]


async def test_refusals_and_failures_pass_through() -> None:
    with pytest.raises(Overloaded, match="full"):
        await deltas(completer(ScriptedSource(refuse_with=Overloaded("full"))), SamplingParams())
    with pytest.raises(GenerationFailed, match="rank 1"):
        await deltas(completer(ScriptedSource(fail_after=3)), SamplingParams())


async def test_a_stream_that_ends_too_early_is_a_failure() -> None:
    source = ScriptedSource(script=lambda request, choice: [98] if choice == 0 else [])
    with pytest.raises(GenerationFailed, match="before every choice"):
        await deltas(completer(source), SamplingParams(n=2))


async def test_nothing_wrong_reaches_the_source() -> None:
    source = ScriptedSource()
    subject = completer(source)
    with pytest.raises(InvalidRequest):
        await subject.prepare("r", "x" * 300, SamplingParams())
    with pytest.raises(InvalidRequest):
        await subject.prepare_chat("r", [], SamplingParams())
    assert source.requests == []


async def test_a_long_text_leaves_the_loop_free() -> None:
    """A text of this size is encoded in a thread: the loop turns while the tokenizer waits for it to."""
    turned = asyncio.Event()
    loop = asyncio.get_running_loop()

    class Waiting(ByteTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
            asyncio.run_coroutine_threadsafe(_set(turned), loop).result(timeout=60)
            return super().encode(text, add_special_tokens=add_special_tokens)

    subject = Completer(Waiting(), None, ScriptedSource(), max_model_len=10**6)
    request = await subject.prepare("r", "x" * 20_000, SamplingParams())
    assert turned.is_set()
    assert len(request.prompt_token_ids) == 20_001


async def _set(event: asyncio.Event) -> None:
    event.set()
