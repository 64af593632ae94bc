"""Tokens to text deltas: billing, finish reasons, stop strings, and the equality of streamed and whole text."""

from functools import reduce
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import GenerationFailed, Unavailable
from cluster.generation import (
    FinishReason,
    GenerationRequest,
    SamplingParams,
    TextDelta,
    TokenDelta,
    TokenLogprob,
)
from cluster.text.choice import ChoiceText, CompletionBuilder, RequestText
from tests.fakes.byte_tokenizer import EOS_ID, ByteTokenizer
from tests.fakes.scripted_source import logprob_of

TOKENIZER = ByteTokenizer()
LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP


def push_all(choice: ChoiceText, deltas: list[TokenDelta]) -> list[TextDelta]:
    return [text for delta in deltas if (text := choice.push(delta)) is not None]


def delta(data: bytes | list[int], reason: FinishReason | None = None, choice: int = 0) -> TokenDelta:
    logprobs = tuple(logprob_of(token_id, 1) for token_id in data)
    return TokenDelta("r", choice, tuple(data), reason, logprobs=logprobs)


def choice(**sampling: object) -> ChoiceText:
    return ChoiceText(0, TOKENIZER, SamplingParams(**sampling))  # type: ignore[arg-type]


def test_the_stop_token_is_billed_and_not_shown() -> None:
    text = choice().push(delta([*b"hi", EOS_ID], STOP))
    assert text == TextDelta(0, "hi", (*b"hi", EOS_ID), STOP, None)


def test_a_stop_token_of_the_user_is_named() -> None:
    text = choice(stop_token_ids=(ord("!"),)).push(delta(b"hi!", STOP))
    assert text == TextDelta(0, "hi", tuple(b"hi!"), STOP, ord("!"))


def test_a_stop_string_inside_a_delta_ends_the_choice_and_drops_the_surplus() -> None:
    subject = choice(stop=("lo",))
    text = subject.push(delta(b"hello world"))
    assert text == TextDelta(0, "hel", tuple(b"hello"), STOP, "lo")
    assert subject.finished
    assert subject.push(delta(b" more", LENGTH)) is None


def test_a_stop_string_over_several_deltas_does_not_leak() -> None:
    texts = push_all(choice(stop=("klmnop",)), [delta([byte]) for byte in b"ijklmnopqr"])
    assert [text.text for text in texts] == ["i", "j", "", "", "", "", "", ""]
    assert sum(len(text.token_ids) for text in texts) == len(b"ijklmnop")
    assert (texts[-1].finish_reason, texts[-1].stop_reason) == (STOP, "klmnop")


def test_text_that_was_held_back_comes_with_the_end() -> None:
    texts = push_all(choice(stop=("xyz",)), [delta(b"ax"), delta(b"y", LENGTH)])
    assert [text.text for text in texts] == ["a", "xy"]
    assert texts[-1].finish_reason is LENGTH


def test_a_stop_string_wins_over_a_length_that_comes_with_it() -> None:
    text = choice(stop=("b",)).push(delta(b"ab", LENGTH))
    assert text == TextDelta(0, "a", tuple(b"ab"), STOP, "b")


def test_cut_in_the_middle_of_a_character() -> None:
    text = choice().push(delta("\u6f22".encode()[:2], LENGTH))
    assert text is not None
    assert text.text == "\ufffd"


def test_what_the_engine_gave_up_is_raised() -> None:
    with pytest.raises(GenerationFailed, match="rank 1 died"):
        choice().push(TokenDelta("r", 0, (), FinishReason.ERROR, "rank 1 died"))
    with pytest.raises(Unavailable, match="ended by the cluster"):
        choice().push(TokenDelta("r", 0, (), FinishReason.ABORT))


@given(
    st.binary(max_size=40) | st.lists(st.sampled_from(b"aab\xc3\xa9\xff"), max_size=20).map(bytes),
    st.lists(st.integers(0, 40), max_size=10),
    st.lists(st.text("ab\u00e9", min_size=1, max_size=3), max_size=3),
    st.booleans(),
    st.integers(0, 5),
)
def test_streamed_text_equals_the_whole_for_every_chunking(
    data: bytes, at: list[int], stop: list[str], include: bool, floor: int
) -> None:
    places = sorted({0, *(place % (len(data) + 1) for place in at), len(data)})
    parts = [data[start:end] for start, end in pairwise(places)] or [b""]
    deltas = [delta(part) for part in parts[:-1]] + [delta(parts[-1], LENGTH)]

    def outcome(deltas: list[TokenDelta]) -> tuple[list[TextDelta], TextDelta]:
        subject = choice(stop=tuple(stop), include_stop_str_in_output=include, min_tokens=floor, logprobs=1)
        texts = push_all(subject, deltas)
        return texts, reduce(TextDelta.followed_by, texts)

    streamed, together = outcome(deltas)
    whole = outcome([delta(data, LENGTH)])[1]
    assert together == whole
    for part in streamed:
        assert len(part.logprobs) == len(part.text_offsets)
    shown = [logprob.token_id for logprob in whole.logprobs]
    assert shown == list(data[: len(shown)])
    assert list(whole.text_offsets) == sorted(whole.text_offsets)
    if whole.finish_reason is LENGTH:
        assert len(shown) == len(data)
    else:
        assert all(offset < len(whole.text) for offset in whole.text_offsets)


@pytest.mark.parametrize("burst", [1, 2, 3, 20])
def test_logprobs_wait_for_their_text_and_go_with_a_stop_string(burst: int) -> None:
    """A token goes out with the first character that follows its beginning, or not at all."""
    subject = choice(stop=("lo ",), logprobs=0)
    data = b"hel" + "\u6f22".encode() + b"lo w"
    texts = push_all(subject, [delta(data[at : at + burst]) for at in range(0, len(data), burst)])
    sent = ""
    for text in texts:
        sent += text.text
        assert all(offset < len(sent) for offset in text.text_offsets)
    whole = reduce(TextDelta.followed_by, texts)
    assert whole.text == "hel\u6f22"
    assert bytes(logprob.token_id for logprob in whole.logprobs) == whole.text.encode()
    assert whole.text_offsets == (0, 1, 2, 3, 3, 3)
    assert whole.token_ids == tuple(data[:-1])  # what is cut off is billed all the same


def test_a_token_that_is_cut_in_its_middle_keeps_its_logprob() -> None:
    class Pairs(ByteTokenizer):
        def token_bytes(self, token_id: int) -> bytes:
            return bytes(divmod(token_id, 1000))

    ids = [ord(first) * 1000 + ord(second) for first, second in ("ab", "c!", "?d")]
    for include, text, shown in ((False, "abc", 2), (True, "abc!?", 3)):
        subject = ChoiceText(
            0, Pairs(), SamplingParams(stop=("!?",), logprobs=0, include_stop_str_in_output=include)
        )
        whole = subject.push(delta(ids))
        assert whole is not None
        assert whole.text == text
        assert [logprob.token_id for logprob in whole.logprobs] == ids[:shown]


def test_the_token_that_stops_has_a_logprob_only_where_it_is_shown() -> None:
    hidden = choice(logprobs=0).push(delta([*b"hi", EOS_ID], STOP))
    shown = choice(logprobs=0, include_stop_str_in_output=True, stop_token_ids=(33,)).push(delta(b"hi!", STOP))
    assert hidden is not None
    assert shown is not None
    assert [logprob.token_id for logprob in hidden.logprobs] == [*b"hi"]
    assert (shown.text, shown.stop_reason) == ("hi!", 33)
    assert [logprob.token_id for logprob in shown.logprobs] == [*b"hi!"]
    end = choice(logprobs=0, include_stop_str_in_output=True).push(delta([*b"hi", EOS_ID], STOP))
    assert end == hidden, "the model's own end is none of the stops that a user asked to see"


def test_a_stop_string_may_be_shown() -> None:
    texts = push_all(choice(stop=("lo",), include_stop_str_in_output=True), [delta(b"hel"), delta(b"lo w")])
    assert [text.text for text in texts] == ["he", "llo"]
    assert (texts[-1].finish_reason, texts[-1].stop_reason) == (STOP, "lo")


def test_no_stop_string_counts_in_the_first_min_tokens() -> None:
    whole = choice(stop=("b",), min_tokens=3).push(delta(b"abcabc"))
    assert whole == TextDelta(0, "abca", tuple(b"abcab"), STOP, "b")


def test_what_the_prompt_has_comes_with_the_first_delta() -> None:
    request = GenerationRequest("r", (1, 2), SamplingParams(n=2, max_tokens=9))
    texts, builder = RequestText(request, TOKENIZER), CompletionBuilder(request)
    scores = (None, TokenLogprob(2, -0.5, ()))
    for index, cached in ((0, 1), (1, 2)):
        first = TokenDelta("r", index, (97,), prompt_logprobs=scores, num_cached_tokens=cached)
        for part in (first, delta(b"b", LENGTH, index)):
            text = texts.push(part)
            assert text is not None
            builder.add(text)
    completion = builder.completion()
    assert completion.prompt_logprobs == scores
    assert completion.num_cached_tokens == 1, "a prompt is billed once, as its first choice found it"


def test_choices_of_a_request_are_kept_apart_and_added_up() -> None:
    request = GenerationRequest("r", (1, 2), SamplingParams(n=2, max_tokens=9, stop=("!",)))
    texts, builder = RequestText(request, TOKENIZER), CompletionBuilder(request)
    for part in (delta(b"one"), delta(b"two!", choice=1), delta(b"..", choice=1), delta(b".", LENGTH)):
        assert not texts.finished
        text = texts.push(part)
        if text is not None:
            builder.add(text)
    assert texts.finished
    completion = builder.completion()
    assert [(one.text, one.finish_reason, one.stop_reason) for one in completion.choices] == [
        ("one.", LENGTH, None),
        ("two", STOP, "!"),
    ]
    assert completion.num_completion_tokens == len(b"one.") + len(b"two!")
    assert completion.prompt_token_ids == (1, 2)
