"""No text has fewer tokens than the bound says; where text can vanish, nothing is said."""

import unicodedata
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from cluster.text.token_bound import NFC_SHRINKS, TokenBound, token_bound

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = [("a", "b"), ("ab", "ab"), ("\u0120", "\u0120")]  # the last is two spaces


def byte_level(*, without: str = "") -> tokenizers.Tokenizer:
    """The longest piece is `abab`, the longest token an added one of 8 bytes."""
    pieces = [piece for piece in ALPHABET if piece not in without] + ["".join(pair) for pair in MERGES]
    tokenizer = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([AddedToken("<\u6f22\u6f22>")])
    return tokenizer


def sentencepiece(*, first_byte: int = 0) -> tokenizers.Tokenizer:
    pieces = [f"<0x{byte:02X}>" for byte in range(first_byte, 256)] + ["\u2581", "a", "\u2581a"]
    model = models.BPE({piece: i for i, piece in enumerate(pieces)}, [("\u2581", "a")], byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    parts = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    tokenizer.normalizer = normalizers.Sequence(parts)
    return tokenizer


def composing() -> tokenizers.Tokenizer:
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


KNOWN = [
    (byte_level(), TokenBound(8)),
    (byte_level(without="XY!"), TokenBound(8, b"!XY")),
    (sentencepiece(), TokenBound(6)),
    (composing(), TokenBound(8 * NFC_SHRINKS)),
]


@pytest.mark.parametrize(("tokenizer", "bound"), KNOWN)
def test_the_longest_token_and_what_has_none(tokenizer: Any, bound: TokenBound) -> None:
    assert token_bound(tokenizer) == bound


@given(
    st.sampled_from([tokenizer for tokenizer, _ in KNOWN]),
    st.text() | st.text("abXY !\u2581\u212a\u1100\u1161\u11a8", min_size=20) | st.just("<\u6f22\u6f22>" * 9),
)
def test_no_text_has_fewer_tokens(tokenizer: Any, text: str) -> None:
    bound = token_bound(tokenizer)
    assert bound is not None
    assert bound.fewest_tokens(text.encode()) <= len(tokenizer.encode(text, add_special_tokens=False).ids)


def test_a_text_of_the_longest_tokens_meets_the_bound() -> None:
    assert TokenBound(4).fewest_tokens(b"abab" * 10) == 10
    assert TokenBound(4).fewest_tokens(b"abab" * 10 + b"a") == 11
    assert TokenBound(4, b"!").fewest_tokens(b"abab!!!!" * 10) == 10


def changed(tokenizer: tokenizers.Tokenizer, **parts: Any) -> tokenizers.Tokenizer:
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


def with_greedy_token() -> tokenizers.Tokenizer:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    return tokenizer


@pytest.mark.parametrize(
    "tokenizer",
    [
        changed(byte_level(), normalizer=normalizers.Strip()),
        changed(byte_level(), normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.NFKC()])),
        changed(byte_level(), normalizer=normalizers.Replace("a", "")),
        changed(byte_level(), pre_tokenizer=pre_tokenizers.Whitespace()),
        changed(
            byte_level(),
            pre_tokenizer=pre_tokenizers.Sequence(
                [pre_tokenizers.Split(Regex("a"), "removed"), pre_tokenizers.ByteLevel()]
            ),
        ),
        changed(byte_level(), pre_tokenizer=None),
        changed(byte_level(without="XY!"), normalizer=normalizers.NFC()),
        sentencepiece(first_byte=1),
        with_greedy_token(),
        tokenizers.Tokenizer(models.WordLevel({"a": 0}, "a")),
    ],
)
def test_no_bound_where_text_can_vanish(tokenizer: Any) -> None:
    assert token_bound(tokenizer) is None


def test_composing_never_shrinks_more_than_the_factor() -> None:
    """Every character against the longest spelling that its parts can be given."""
    size: dict[str, int] = {}
    in_parts: dict[str, str] = {}  # what is no part of another character, nor made of others, cannot shrink
    for code in range(0x30000):  # nothing above is composed
        if unicodedata.decomposition(character := chr(code)) or 0xAC00 <= code < 0xD7A4:
            in_parts[character] = unicodedata.normalize("NFD", character)
    for character, parts in in_parts.items():
        for part in parts:
            spelling = max(len(part.encode()), len(character.encode()) if parts == part else 0)
            size[part] = max(size.get(part, 0), spelling)
    for character, parts in {**{part: part for part in size}, **in_parts}.items():
        if unicodedata.is_normalized("NFC", character):
            assert sum(size[part] for part in parts) <= NFC_SHRINKS * len(character.encode())
    assert size["K"] == 3  # the Kelvin sign
