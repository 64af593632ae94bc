"""GGUF tokenizers: the conversion, its cache, and SmolLM2's ids against `transformers`."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from tokenizers import Tokenizer, pre_tokenizers

from cluster.text import gguf_tokenizer
from cluster.text.chat_template import load_chat_template
from cluster.text.gguf_tokenizer import convert, gguf_tokenizer_files
from cluster.text.tokenizer import HuggingFaceTokenizer, load_tokenizer
from model_shards.errors import CheckpointError, UnsupportedModel

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = ["<|end|>", "<tool>", *ALPHABET, "120", "12", "\u0120\u0120", "ab", "abc"]
PATH = Path("model.gguf")


def metadata(**changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": TOKENS,
        "token_type": [3, 4] + [1] * (len(TOKENS) - 2),
        "merges": ["1 2", "12 0", "\u0120 \u0120", "a b"],
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    fields |= changes
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items() if value is not None}


def ids_of(text: str, **changes: Any) -> list[str]:
    """The tokens of `text`, spelled."""
    tokenizer = Tokenizer.from_str(convert(metadata(**changes), PATH)["tokenizer.json"])
    tokens: list[str] = tokenizer.encode(text).tokens
    return tokens


@pytest.mark.parametrize(
    ("pre", "text", "tokens"),
    [
        ("gpt-2", "1201", ["120", "1"]),
        ("default", "1201", ["120", "1"]),
        (None, "1201", ["120", "1"]),
        ("smollm", "1201", ["1", "2", "0", "1"]),
        ("smollm", "a  1", ["a", "\u0120\u0120", "1"]),  # spaces stay together before a digit
        ("gpt-2", "a  1", ["a", "\u0120", "\u0120", "1"]),
        ("llama-bpe", "120120", ["<|end|>", "120", "120"]),  # threes; and a BOS unless the file says no
        ("llama-bpe", "abc", ["<|end|>", "abc"]),  # no merge makes it, but it is in the vocabulary
        ("gpt-2", "abc", ["ab", "c"]),
        ("qwen2", "1201", ["1", "2", "0", "1"]),
        ("qwen2", "e\u0301", ["\u00c3", "\u00a9"]),  # NFC
        ("gpt-2", "a<tool>b<|end|>", ["a", "<tool>", "b", "<|end|>"]),
    ],
)
def test_pre_tokenizers(pre: str | None, text: str, tokens: list[str]) -> None:
    assert ids_of(text, pre=pre) == tokens


def test_bos_and_eos_around_a_raw_prompt() -> None:
    assert ids_of("a") == ["a"]
    assert ids_of("a", add_bos_token=True) == ["<|end|>", "a"]
    assert ids_of("a", add_eos_token=True) == ["a", "<|end|>"]
    assert ids_of("a", pre="llama-bpe", add_bos_token=False) == ["a"]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": "llama"}, UnsupportedModel, "model.gguf: a GGUF tokenizer of kind 'llama'"),
        ({"pre": "tekken"}, UnsupportedModel, "pre-tokenizer 'tekken' is not supported; known are default"),
        ({"model": None}, CheckpointError, r"no tokenizer\.ggml\.model"),
        ({"merges": None}, CheckpointError, r"no tokenizer\.ggml\.merges"),
        ({"merges": ["a \u4e00"]}, CheckpointError, "merges"),
        ({"eos_token_id": 10**6}, CheckpointError, "eos_token_id 1000000 is outside"),
    ],
)
def test_what_cannot_be_converted(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        convert(metadata(**changes), PATH)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    writer = GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 4] + [1] * (len(TOKENS) - 2))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    writer.add_eot_token_id(1)
    writer.add_chat_template("{{ eos_token }}?")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were converted rather than taken from the cache."""
    seen: list[Path] = []
    real: Callable[..., dict[str, str]] = gguf_tokenizer.convert

    def counting(metadata: dict[str, Any], path: Path) -> dict[str, str]:
        seen.append(path)
        return real(metadata, path)

    monkeypatch.setattr(gguf_tokenizer, "convert", counting)
    return seen


def test_a_file_is_converted_once(model: Path, tmp_path: Path, conversions: list[Path]) -> None:
    first = gguf_tokenizer_files(model, tmp_path / "cache")
    assert gguf_tokenizer_files(model, tmp_path / "cache") == first
    assert conversions == [model]
    assert [entry.suffix for entry in (tmp_path / "cache").iterdir()] == [".msgpack"]


def test_a_changed_file_is_converted_again(model: Path, tmp_path: Path, conversions: list[Path]) -> None:
    gguf_tokenizer_files(model, tmp_path / "cache")
    os.utime(model, ns=(1, 1))
    gguf_tokenizer_files(model, tmp_path / "cache")
    assert len(conversions) == 2


@pytest.mark.parametrize("kept", [b"", b"\x81", b"not msgpack", b"\x80"])
def test_a_broken_entry_is_made_anew(model: Path, tmp_path: Path, conversions: list[Path], kept: bytes) -> None:
    files = gguf_tokenizer_files(model, tmp_path / "cache")
    (entry,) = (tmp_path / "cache").iterdir()
    entry.write_bytes(kept)
    assert gguf_tokenizer_files(model, tmp_path / "cache") == files
    assert gguf_tokenizer_files(model, tmp_path / "cache") == files
    assert len(conversions) == 2


def test_a_crash_while_writing_leaves_no_entry(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, conversions: list[Path]
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        files = gguf_tokenizer_files(model, tmp_path / "cache")  # works all the same
    assert list((tmp_path / "cache").iterdir()) == []
    assert gguf_tokenizer_files(model, tmp_path / "cache") == files
    assert len(conversions) == 2


def test_a_cache_that_cannot_be_written_does_not_matter(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "tokenizer.json" in gguf_tokenizer_files(model, tmp_path / "file" / "cache")


def test_special_tokens_and_template(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert load_tokenizer(model).eos_token_ids == (0, 1)
    template = load_chat_template(model)
    assert template is not None
    assert template.render([]) == "<|end|>?"


CORPUS = (
    "Hello, world! It's 10:45 and we'll pay $1,234.56.",
    "def f(x):\n    return {'a': [x ** 2 for _ in range(3)]}  # code\n\n\n\tif True:\tpass\n",
    "\U0001f642 \U0001f469\u200d\U0001f469\u200d\U0001f467 \u6f22\u5b57\u304b\u306a",
    "\ud55c\uad6d\uc5b4 \u0623\u0647\u0644\u0627",
    "na\u00efve caf\u00e9 stra\u00dfe \u0141\u00f3d\u017a \u0395\u03bb\u03bb\u03ac\u03b4\u03b1 e\u0301",
    "  leading and trailing   \n\n  \t mixed\r\n",
    "<|im_start|>user\nspecial<|im_end|> tokens <|endoftext|><repo_name> in text",
    "1 22 333 4444 x5y",
    "https://example.org/a?b=c&d=%20#e \\frac{1}{2} I'D 'TIS don't",
    "\x00\x01\x7f\u00a0\u2003\ufeff\ufffd",
    "",
)


@pytest.mark.smollm2
def test_smollm2_ids_equal_those_of_transformers(smollm2_path: Path) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)
    ours = load_tokenizer(smollm2_path)
    for text in CORPUS:
        assert list(ours.encode(text, add_special_tokens=True)) == reference.encode(text), text
        assert ours.decode(reference.encode(text)) == reference.decode(
            reference.encode(text), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
    # transformers takes GPT-2's pre-tokenizer for every GGUF file; this one names `smollm`, which parts digits off
    # before anything else. The two differ at spaces before a digit and at digits of other scripts.
    backend = reference.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    digits = ("a list:\n\n1. one\n\n2. two", "x =   42", "\u0663\u0664 \u00bd \u2167")
    for text in (*CORPUS, *digits):
        assert list(ours.encode(text, add_special_tokens=True)) == backend.encode(text).ids, text

    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi!"}]
    template = load_chat_template(smollm2_path)
    assert template is not None
    for conversation in (messages, messages[1:]):
        assert template.render(conversation) == reference.apply_chat_template(
            conversation, tokenize=False, add_generation_prompt=True
        )
    assert isinstance(ours, HuggingFaceTokenizer)
    assert ours.eos_token_ids == (reference.eos_token_id,)
