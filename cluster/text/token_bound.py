"""How few tokens a text can have, so that one that cannot fit is refused before it is encoded.

Knows which parts of a tokenizer keep every byte of a text. For any part that it does not know to, or that may drop
text, there is no bound: a wrong one would refuse prompts that fit.
"""

import json
from dataclasses import dataclass
from typing import Any

from cluster.text.byte_spelling import CHARACTER_OF_BYTE

_BYTE_FALLBACK = tuple(f"<0x{byte:02X}>" for byte in range(256))
NFC_SHRINKS = 4  # three times for the Kelvin sign and for Hangul letters, and never more than this


@dataclass(frozen=True, slots=True)
class TokenBound:
    """No token stands for more than `longest` bytes of UTF-8; bytes in `dropped` have no token at all."""

    longest: int
    dropped: bytes = b""

    def fewest_tokens(self, text: bytes) -> int:
        return -(-len(text.translate(None, self.dropped)) // self.longest)


def token_bound(tokenizer: Any) -> TokenBound | None:
    """The bound of a tokenizer of the `tokenizers` package; None where none is known."""
    shrinks = _normalisers_shrink(tokenizer.normalizer)
    kinds = _pre_tokenizers_that_keep_all(tokenizer.pre_tokenizer)
    if shrinks is None or kinds is None or type(tokenizer.model).__name__ != "BPE":
        return None
    added = tokenizer.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):
        return None  # such a token takes any number of spaces with it
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    dropped = b""
    if "ByteLevel" in kinds:
        longest = max(map(len, vocabulary), default=1)  # a character of a piece is a byte of text
        dropped = bytes(byte for byte in range(256) if CHARACTER_OF_BYTE[byte] not in vocabulary)
    elif tokenizer.model.byte_fallback and vocabulary.keys() >= set(_BYTE_FALLBACK):
        longest = max(len(piece.encode()) for piece in vocabulary)
    else:
        return None  # what is not in the vocabulary may vanish
    if dropped and shrinks > 1:
        return None  # which bytes of a text vanish shows in its normal form only
    longest_added = max((len(token.content.encode()) for token in added), default=0)
    return TokenBound(shrinks * max(longest, longest_added), dropped)


def _normalisers_shrink(normalizer: Any) -> int | None:
    """How many times longer than its normal form a text can be; None when unknown."""
    factor = 1
    for part in _parts(normalizer, "normalizers"):
        if part["type"] == "NFC":
            factor *= NFC_SHRINKS
        elif part["type"] != "Prepend" and not _is_space_spelled_out(part):
            return None
    return factor


def _is_space_spelled_out(part: dict[str, Any]) -> bool:
    return (part["type"], part.get("pattern"), part.get("content")) == ("Replace", {"String": " "}, "\u2581")


def _pre_tokenizers_that_keep_all(pre_tokenizer: Any) -> set[str] | None:
    """The kinds of all parts; None when one of them may drop text."""
    kinds = set()
    for part in _parts(pre_tokenizer, "pretokenizers"):
        if part["type"] not in {"ByteLevel", "Digits", "Metaspace", "Split"} or part.get("behavior") == "Removed":
            return None
        kinds.add(str(part["type"]))
    return kinds


def _parts(component: Any, name: str) -> list[dict[str, Any]]:
    if component is None:
        return []
    state = json.loads(component.__getstate__())
    parts: list[dict[str, Any]] = state[name] if state["type"] == "Sequence" else [state]
    return parts
