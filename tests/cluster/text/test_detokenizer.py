"""Whole characters only, whatever the cuts; invalid bytes once; an open character is settled at the end."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from cluster.text.detokenizer import Detokenizer
from tests.fakes.byte_tokenizer import EOS_ID, ByteTokenizer

REPLACEMENT = "\ufffd"
MIXED = "h\u00e9llo \U0001f642 \u6f22\u5b57 \U0001f469\u200d\U0001f469\u200d\U0001f467"


def cut(data: bytes, at: list[int]) -> list[bytes]:
    places = sorted({0, *(place % (len(data) + 1) for place in at), len(data)})
    return [data[start:end] for start, end in pairwise(places)]


def test_no_replacement_character_in_any_delta_of_a_valid_stream() -> None:
    detokenizer = Detokenizer(ByteTokenizer())
    deltas = [detokenizer.push([byte]) for byte in MIXED.encode()] + [detokenizer.finish()]
    assert "".join(deltas) == MIXED
    assert not any(REPLACEMENT in delta for delta in deltas)
    assert deltas[:3] == ["h", "", "\u00e9"]  # each character comes with its last byte, no later


@given(st.binary(max_size=60), st.lists(st.integers(0, 60), max_size=8))
def test_any_bytes_in_any_pieces_give_the_whole_text(data: bytes, at: list[int]) -> None:
    detokenizer = Detokenizer(ByteTokenizer())
    text = "".join(detokenizer.push(piece) for piece in cut(data, at)) + detokenizer.finish()
    assert text == data.decode("utf-8", "replace")


def test_an_invalid_byte_is_shown_at_once_and_once() -> None:
    detokenizer = Detokenizer(ByteTokenizer())
    assert [detokenizer.push([byte]) for byte in (0xFF, ord("a"))] == [REPLACEMENT, "a"]
    assert detokenizer.finish() == ""


def test_a_character_that_is_never_completed_becomes_one_replacement() -> None:
    detokenizer = Detokenizer(ByteTokenizer())
    assert detokenizer.push("\U0001f642".encode()[:3]) == ""
    assert detokenizer.finish() == REPLACEMENT


def test_special_tokens_have_no_text() -> None:
    assert Detokenizer(ByteTokenizer()).push([ord("a"), EOS_ID, ord("b")]) == "ab"
