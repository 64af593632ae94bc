"""A GGUF file's tokenizer as Hugging Face files, converted once and kept in the user's cache.

Knows GGUF's tokenizer fields and byte-level BPE; knows nothing of encoding text. Pre-tokenizers are those that the
file names (`tokenizer.ggml.pre`), as the model was trained with; a name that is not in the table is refused, since
a near miss would give slightly wrong ids without a sign of it.
"""

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgpack
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from model_shards.built_in import cache_folder
from model_shards.errors import CheckpointError, UnsupportedModel
from model_shards.weights.gguf_header import GgufHeader

_log = logging.getLogger(__name__)

_CONVERSION = 1  # counts up when the same file would be converted differently
_FINGERPRINTED_BYTES = 1 << 20
_CONTROL, _USER_DEFINED = 3, 4  # GGUF's token types that are matched as a whole

_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SIGNS_AND_SPACES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split_by(digits: str) -> Any:
    pattern = Regex("|".join((_CONTRACTIONS, _WORDS, digits, _SIGNS_AND_SPACES)))
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _digits_in_threes() -> Any:
    return _split_by(r"\p{N}{1,3}")


def _digits_alone() -> Any:
    return _split_by(r"\p{N}")


_PRE_TOKENIZERS = {
    "default": _gpt2,
    "gpt-2": _gpt2,
    "smollm": _single_digits,
    "starcoder": _single_digits,
    "llama-bpe": _digits_in_threes,
    "llama3": _digits_in_threes,
    "llama-v3": _digits_in_threes,
    "qwen2": _digits_alone,
}
_WHOLE_WORDS_FIRST = frozenset({"llama-bpe", "llama3", "llama-v3"})  # a word in the vocabulary needs no merges
_BOS_BY_DEFAULT = _WHOLE_WORDS_FIRST
_NORMALISED = frozenset({"qwen2"})


def gguf_tokenizer_files(path: Path, cache: Path | None = None) -> Mapping[str, str]:
    """File name -> contents of the tokenizer in `path`, as a folder in Hugging Face's layout would have them.

    Taken from `cache` (default: the user's cache folder) where the same file was converted before. Raises
    `CheckpointError` for a file that cannot be read, `UnsupportedModel` for another kind of tokenizer.
    """
    kept = (cache or cache_folder().parent / "tokenizers") / f"{_fingerprint(path)}.msgpack"
    files = _read_kept(kept)
    if files is None:
        files = convert(read_metadata(path), path)
        _keep(files, kept)
    return files


def read_metadata(path: Path) -> dict[str, Any]:
    """The scalar fields of a GGUF file, and the arrays that a tokenizer is made of."""
    header = GgufHeader(path)
    arrays = [f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "merges")]
    return dict(header.fields) | {key: header.array(key) for key in arrays if header.has_array(key)}


def convert(metadata: Mapping[str, Any], path: Path) -> dict[str, str]:
    """File name -> contents, in Hugging Face's layout. `path` is for messages."""
    vocabulary = _Vocabulary(metadata, path)
    return {
        "tokenizer_config.json": json.dumps(vocabulary.tokenizer_config(), ensure_ascii=False),
        "generation_config.json": json.dumps({"eos_token_id": vocabulary.eos_token_ids()}),
        "tokenizer.json": vocabulary.build().to_str(),
    }


class _Vocabulary:
    """The tokenizer fields of one file, read with a message for each that is missing."""

    def __init__(self, metadata: Mapping[str, Any], path: Path) -> None:
        self._metadata = metadata
        self._path = path
        kind = self._need("model")
        if kind != "gpt2":
            raise UnsupportedModel(
                f"{path}: a GGUF tokenizer of kind {kind!r} is not supported, only byte-level BPE ('gpt2'); "
                "the model's folder in Hugging Face layout has a tokenizer.json that may be"
            )
        self._pre = str(self._field("pre") or "default")
        if self._pre not in _PRE_TOKENIZERS:
            raise UnsupportedModel(
                f"{path}: pre-tokenizer {self._pre!r} is not supported; known are {', '.join(_PRE_TOKENIZERS)}"
            )
        self._tokens: Sequence[str] = self._need("tokens")

    def build(self) -> Any:
        vocabulary = {token: token_id for token_id, token in enumerate(self._tokens)}
        merges = self._merges(vocabulary)
        model = models.BPE(vocabulary, merges, ignore_merges=self._pre in _WHOLE_WORDS_FIRST)
        tokenizer = tokenizers.Tokenizer(model)
        if self._pre in _NORMALISED:
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = _PRE_TOKENIZERS[self._pre]()
        tokenizer.decoder = decoders.ByteLevel()
        types = self._field("token_type") or ()
        for kind, add in ((_CONTROL, tokenizer.add_special_tokens), (_USER_DEFINED, tokenizer.add_tokens)):
            whole = [token for token, token_type in zip(self._tokens, types, strict=False) if token_type == kind]
            add([AddedToken(token, normalized=False, special=kind == _CONTROL) for token in whole])
        before, after = self._surrounding_tokens()
        if before or after:
            tokenizer.post_processor = processors.TemplateProcessing(
                single=[*before, "$A", *after],
                special_tokens=[(token, vocabulary[token]) for token in dict.fromkeys(before + after)],
            )
        else:
            tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
        return tokenizer

    def tokenizer_config(self) -> dict[str, Any]:
        names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        texts = {name: self._token(field) for name, field in names.items()}
        known: dict[str, Any] = {name: text for name, text in texts.items() if text is not None}
        template = self._metadata.get("tokenizer.chat_template")
        return known | ({} if template is None else {"chat_template": template})

    def eos_token_ids(self) -> list[int]:
        ids = [self._field(f"{name}_token_id") for name in ("eos", "eot", "eom")]
        return list(dict.fromkeys(int(token_id) for token_id in ids if token_id is not None))

    def _surrounding_tokens(self) -> tuple[list[str], list[str]]:
        """What goes before and after a raw prompt."""
        add_bos = self._field("add_bos_token")
        if add_bos is None:
            add_bos = self._pre in _BOS_BY_DEFAULT
        bos, eos = self._token("bos"), self._token("eos")
        return (
            [bos] if add_bos and bos is not None else [],
            [eos] if self._field("add_eos_token") and eos is not None else [],
        )

    def _token(self, name: str) -> str | None:
        token_id = self._field(f"{name}_token_id")
        if token_id is None:
            return None
        if not 0 <= token_id < len(self._tokens):
            raise CheckpointError(
                f"{self._path}: {name}_token_id {token_id} is outside 0..{len(self._tokens) - 1}"
            )
        return str(self._tokens[token_id])

    def _merges(self, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
        merges = []
        for merge in self._need("merges"):
            left, _, right = merge.partition(" ")
            if not (left in vocabulary and right in vocabulary and left + right in vocabulary):
                raise CheckpointError(f"{self._path}: tokenizer.ggml.merges has {merge!r}, which no tokens spell")
            merges.append((left, right))
        return merges

    def _field(self, name: str) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{name}")

    def _need(self, name: str) -> Any:
        value = self._field(name)
        if value is None:
            raise CheckpointError(f"{self._path}: no tokenizer.ggml.{name}: the file has no tokenizer")
        return value


def _read_kept(kept: Path) -> dict[str, str] | None:
    """None when there is nothing, or nothing whole: a broken entry is made anew."""
    try:
        files = msgpack.unpackb(kept.read_bytes())
    except (OSError, ValueError, msgpack.exceptions.UnpackException):
        return None
    return files if isinstance(files, dict) and "tokenizer.json" in files else None


def _keep(files: dict[str, str], kept: Path) -> None:
    """Readers see the whole entry or none. A cache that cannot be written only costs the next start some time."""
    unfinished = None
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=kept.parent, prefix=f".{kept.name}.", delete=False) as file:
            unfinished = Path(file.name)
            file.write(msgpack.packb(files))
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(kept)
    except OSError as error:
        _log.warning("the converted tokenizer is not kept in %s: %s", kept.parent, error.strerror or error)
        if unfinished is not None:
            unfinished.unlink(missing_ok=True)


def _fingerprint(path: Path) -> str:
    """Another file, or the same one changed, gets another folder. The vocabulary's start is in the first MiB."""
    try:
        status = path.stat()
        with path.open("rb") as file:
            start = file.read(_FINGERPRINTED_BYTES)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from None
    digest = hashlib.sha256(start)
    digest.update(f"{_CONVERSION} {path.name} {status.st_size} {status.st_mtime_ns}".encode())
    return digest.hexdigest()[:32]
