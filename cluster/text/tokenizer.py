"""Text to token ids and back: what the rest of the text storey needs of a tokenizer, and the one we use.

Knows `tokenizer.json` and the decoders that map each token to a fixed run of bytes (byte-level BPE, and
SentencePiece with byte fall-back). Knows nothing of requests, chat or streams.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from cluster.text.byte_spelling import BYTE_OF_CHARACTER
from cluster.text.token_bound import token_bound
from cluster.text.tokenizer_files import TokenizerFiles, read_tokenizer_files
from model_shards.errors import CheckpointError, UnsupportedModel


class Tokenizer(Protocol):
    """What turns text into ids and ids into bytes."""

    @property
    def vocab_size(self) -> int:
        """One more than the highest id that the tokenizer knows."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that end a sequence; the first is the tokenizer's own end-of-sequence token."""
        ...

    def fewest_tokens(self, text: bytes) -> int:
        """How many tokens the UTF-8 text has at least, told without encoding it; 0 where that is not known."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """The ids of `text`. With `add_special_tokens`, what the tokenizer puts around a raw prompt comes too."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a whole sequence. Special tokens have none; invalid UTF-8 becomes U+FFFD."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds to a running text; nothing for special tokens and unknown ids."""
        ...

    def special_text(self, token_id: int) -> str:
        """How a special token is written; nothing for all others and unknown ids."""
        ...


class HuggingFaceTokenizer:
    """The Rust tokenizer of the `tokenizers` package. Thread-safe.

    Encoding and decoding go through the package's calls for batches, with a batch of one: only those release the
    interpreter lock. Its calls for one text keep it, which for a text of a megabyte is a second in which no other
    thread runs.
    """

    def __init__(self, files: TokenizerFiles) -> None:
        self._tokenizer = _build(files.tokenizer_json)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._to_bytes = _bytes_of_piece(self._tokenizer.decoder)
        self._special_ids = frozenset(
            token_id for token_id, token in self._tokenizer.get_added_tokens_decoder().items() if token.special
        )
        self._bytes: dict[int, bytes] = {}  # filled as ids are met: a whole vocabulary would cost 50 ms at start
        self._vocab_size = _vocab_size(self._tokenizer)
        self._eos_token_ids = _eos_token_ids(self._tokenizer, files)
        self._bound = token_bound(self._tokenizer)

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self._eos_token_ids

    def fewest_tokens(self, text: bytes) -> int:
        return 0 if self._bound is None else self._bound.fewest_tokens(text)

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return tuple(encoding.ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str
        (text,) = self._tokenizer.decode_batch([list(token_ids)], skip_special_tokens=True)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        known = self._bytes.get(token_id)
        if known is None:
            piece = None if token_id in self._special_ids else self._tokenizer.id_to_token(token_id)
            known = self._bytes[token_id] = b"" if piece is None else self._to_bytes(piece)
        return known

    def special_text(self, token_id: int) -> str:
        return str(self._tokenizer.id_to_token(token_id)) if token_id in self._special_ids else ""


def load_tokenizer(path: Path) -> HuggingFaceTokenizer:
    """The tokenizer of a model folder or a `.gguf` file.

    Raises `CheckpointError` for missing or broken files, `UnsupportedModel` for a kind of tokenizer we do not run.
    """
    return HuggingFaceTokenizer(read_tokenizer_files(path))


def _build(tokenizer_json: str) -> Any:
    try:
        return tokenizers.Tokenizer.from_str(tokenizer_json)
    except Exception as error:  # the package raises no narrower class
        raise CheckpointError(f"tokenizer.json is not a tokenizer that we can load: {error}") from None


def _vocab_size(tokenizer: Any) -> int:
    """Added tokens may stand above a gap, so counting all entries would fall short of the highest id."""
    added = max(tokenizer.get_added_tokens_decoder(), default=-1)
    return max(int(tokenizer.get_vocab_size(with_added_tokens=False)), int(added) + 1)


def _eos_token_ids(tokenizer: Any, files: TokenizerFiles) -> tuple[int, ...]:
    own = None if files.eos_token is None else tokenizer.token_to_id(files.eos_token)
    ids = files.eos_token_ids if own is None else (own, *files.eos_token_ids)
    return tuple(dict.fromkeys(ids))


def _bytes_of_piece(decoder: Any) -> Callable[[str], bytes]:
    """How a vocabulary entry spells its bytes, told from the tokenizer's decoder."""
    if decoder is None:
        return str.encode
    kinds = _decoder_kinds(decoder)
    if kinds == ["ByteLevel"]:
        return _byte_level_bytes
    # Strip drops the space that SentencePiece puts before a text; a continuation keeps its first space.
    if set(kinds) <= {"Replace", "Metaspace", "ByteFallback", "Fuse", "Strip"}:
        return _sentencepiece_bytes
    raise UnsupportedModel(f"tokenizer.json: a decoder of kind {' + '.join(kinds)} is not supported")


def _decoder_kinds(decoder: Any) -> list[str]:
    state = json.loads(decoder.__getstate__())
    parts = state["decoders"] if state["type"] == "Sequence" else [state]
    return [str(part["type"]) for part in parts]


def _byte_level_bytes(piece: str) -> bytes:
    try:
        return bytes([BYTE_OF_CHARACTER[character] for character in piece])
    except KeyError:
        return piece.encode()  # an added token, spelled as it is


def _sentencepiece_bytes(piece: str) -> bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes.fromhex(piece[3:5])
    return piece.replace("\u2581", " ").encode()
