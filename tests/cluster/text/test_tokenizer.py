"""tokenizer.json and its companions; bytes of tokens against the Rust decoder."""

import json
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from cluster.text.chat_template import load_chat_template
from cluster.text.detokenizer import Detokenizer
from cluster.text.tokenizer import HuggingFaceTokenizer, load_tokenizer
from model_shards.errors import CheckpointError, UnsupportedModel


def byte_level() -> tokenizers.Tokenizer:
    """Every byte is a token, plus one merge, two specials and an added token that is text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(
        models.BPE({piece: i for i, piece in enumerate([*alphabet, "ab"])}, [("a", "b")])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    tokenizer.add_tokens([AddedToken("<tool call>"), AddedToken("\u6f22!")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 257)])
    return tokenizer


def sentencepiece() -> tokenizers.Tokenizer:
    pieces = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"\u2581": 256, "a": 257, "\u2581a": 258}
    tokenizer = tokenizers.Tokenizer(models.BPE(pieces, [("\u2581", "a")], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def folder(path: Path, tokenizer: tokenizers.Tokenizer, **files: Any) -> Path:
    tokenizer.save(str(path / "tokenizer.json"))
    for name, contents in files.items():
        (path / f"{name}.json").write_text(json.dumps(contents))
    return path


def test_special_tokens_and_template_of_a_folder(tmp_path: Path) -> None:
    config = {
        "bos_token": {"content": "<s>", "lstrip": False},
        "eos_token": "</s>",
        "pad_token": None,
        "chat_template": [
            {"name": "tool_use", "template": "no"},
            {"name": "default", "template": "{{ bos_token }}!"},
        ],
    }
    path = folder(tmp_path, byte_level(), tokenizer_config=config, generation_config={"eos_token_id": [3, 258]})
    tokenizer = load_tokenizer(path)
    assert tokenizer.eos_token_ids == (258, 3)  # its own first
    assert tokenizer.vocab_size == 261
    assert tokenizer.encode("ab", add_special_tokens=True) == (257, 256)
    assert tokenizer.encode("ab", add_special_tokens=False) == (256,)
    template = load_chat_template(path)
    assert template is not None
    assert template.render([{"role": "user", "content": "x"}]) == "<s>!"
    (path / "chat_template.jinja").write_text("from its own file")
    template = load_chat_template(path)
    assert template is not None
    assert template.render([{"role": "user", "content": "x"}]) == "from its own file"


def test_eos_of_config_json_counts_where_there_is_no_generation_config(tmp_path: Path) -> None:
    assert load_tokenizer(folder(tmp_path, byte_level(), config={"eos_token_id": 7})).eos_token_ids == (7,)


def test_a_model_without_template(tmp_path: Path) -> None:
    assert load_chat_template(folder(tmp_path, byte_level())) is None


@pytest.mark.parametrize(
    ("name", "contents", "message"),
    [
        ("tokenizer.json", "{}", "tokenizer.json is not a tokenizer"),
        ("tokenizer_config.json", "{", "tokenizer_config.json: not JSON"),
        ("tokenizer_config.json", "[]", "expected a JSON object, found list"),
        ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id must be"),
        ("chat_template.jinja", b"\xff", "chat_template.jinja: cannot be read"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, name: str, contents: str | bytes, message: str) -> None:
    path = folder(tmp_path, byte_level())
    (path / name).write_bytes(contents.encode() if isinstance(contents, str) else contents)
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(path)


def test_a_folder_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: no such file"):
        load_tokenizer(tmp_path)


def test_an_unknown_decoder_is_refused_by_name(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedModel, match="WordPiece"):
        load_tokenizer(folder(tmp_path, tokenizer))


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    return load_tokenizer(folder(tmp_path_factory.mktemp("tokenizer"), byte_level()))


@settings(max_examples=300)
@given(st.lists(st.integers(0, 300), max_size=30))
def test_bytes_of_tokens_give_the_text_of_the_rust_decoder(loaded: HuggingFaceTokenizer, ids: list[int]) -> None:
    detokenizer = Detokenizer(loaded)
    assert "".join(detokenizer.push([one]) for one in ids) + detokenizer.finish() == loaded.decode(ids)


def test_sentencepiece_bytes(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder(tmp_path, sentencepiece()))
    ids = [258, 257, *"\U0001f642".encode(), 256, 257]
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == " aa\U0001f642 a"
    assert tokenizer.decode(ids) == "aa\U0001f642 a"  # a whole text loses the first space, a continuation does not


def test_special_tokens_have_a_name_and_no_bytes(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder(tmp_path, byte_level()))
    special, added = tokenizer.encode("<s><tool call>", add_special_tokens=False)
    assert (tokenizer.special_text(special), tokenizer.token_bytes(special)) == ("<s>", b"")
    assert (tokenizer.special_text(added), tokenizer.token_bytes(added)) == ("", b"<tool call>")
    assert tokenizer.special_text(10**6) == ""


@given(st.text() | st.text("ab <s>/"), st.booleans())
def test_ids_are_those_of_the_packages_own_call(loaded: HuggingFaceTokenizer, text: str, add: bool) -> None:
    own = byte_level().encode(text, add_special_tokens=add).ids
    assert loaded.encode(text, add_special_tokens=add) == tuple(own)


def longest_held_share(call: Callable[[], object]) -> float:
    """The largest part of a call in which another thread, which looks at the time in a loop, had no turn."""
    over = threading.Event()
    turns: list[float] = []

    def count() -> None:
        while not over.wait(0.0005):
            turns.append(time.perf_counter())

    counter = threading.Thread(target=count)
    counter.start()
    began = time.perf_counter()
    call()
    ended = time.perf_counter()
    over.set()
    counter.join()
    during = [began, *(turn for turn in turns if began < turn < ended), ended]
    return max(later - earlier for earlier, later in pairwise(during)) / (ended - began)


def test_others_run_while_a_long_text_is_encoded_and_decoded(loaded: HuggingFaceTokenizer) -> None:
    """The package's calls for one text hold the lock: a share of nearly 1 each time, on the idlest machine too."""
    text = "a " * 200_000
    ids = loaded.encode(text, add_special_tokens=False)
    calls = (lambda: loaded.encode(text, add_special_tokens=False), lambda: loaded.decode(ids))
    for call in calls:
        assert min(longest_held_share(call) for _ in range(3)) < 0.7
