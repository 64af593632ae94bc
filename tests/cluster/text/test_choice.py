"""Tokens to text deltas: billing, finish reasons, stop strings, and the equality of streamed and whole text."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import GenerationFailed, Unavailable
from cluster.generation import FinishReason, GenerationRequest, SamplingParams, TextDelta, TokenDelta
from cluster.text.choice import ChoiceText, CompletionBuilder, RequestText
from tests.fakes.byte_tokenizer import EOS_ID, ByteTokenizer

TOKENIZER = ByteTokenizer()
LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP


def push_all(choice: ChoiceText, deltas: list[TokenDelta]) -> list[TextDelta]:
    return [text for delta in deltas if (text := choice.push(delta)) is not None]


def delta(data: bytes | list[int], reason: FinishReason | None = None, choice: int = 0) -> TokenDelta:
    return TokenDelta("r", choice, tuple(data), reason)


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
    st.binary(max_size=40),
    st.lists(st.integers(0, 40), max_size=10),
    st.lists(st.text("ab\u00e9", min_size=1, max_size=3), max_size=3),
)
def test_streamed_text_equals_the_whole_for_every_chunking(data: bytes, at: list[int], stop: list[str]) -> None:
    places = sorted({0, *(place % (len(data) + 1) for place in at), len(data)})
    parts = [data[start:end] for start, end in pairwise(places)] or [b""]
    deltas = [delta(part) for part in parts[:-1]] + [delta(parts[-1], LENGTH)]

    def outcome(deltas: list[TokenDelta]) -> tuple[str, tuple[int, ...], object, object]:
        texts = push_all(choice(stop=tuple(stop)), deltas)
        billed = tuple(token_id for text in texts for token_id in text.token_ids)
        return "".join(text.text for text in texts), billed, texts[-1].finish_reason, texts[-1].stop_reason

    assert outcome(deltas) == outcome([delta(data, LENGTH)])


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
