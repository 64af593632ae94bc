"""What a model's files say about its tokenizer: Hugging Face's folder layout, or a GGUF file.

Knows file names and which of them wins; knows nothing of how text is encoded.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.text.gguf_tokenizer import gguf_tokenizer_files
from model_shards.errors import CheckpointError

_Read = Callable[[str], str | None]  # file name -> contents, None when there is no such file


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """The contents that matter. `eos_token_ids` are those of generation_config.json (else config.json)."""

    tokenizer_json: str
    bos_token: str | None
    eos_token: str | None
    eos_token_ids: tuple[int, ...]
    chat_template: str | None
    other_special_tokens: dict[str, str]  # name -> text, for chat templates: pad_token, unk_token ...


def read_tokenizer_files(path: Path) -> TokenizerFiles:
    """Read a model folder, or a `.gguf` file by way of its conversion in the user's cache.

    Raises `CheckpointError` that names the file, `UnsupportedModel` for a GGUF tokenizer we cannot convert.
    """
    read = gguf_tokenizer_files(path).get if path.suffix == ".gguf" else _reader(path)
    contents = read("tokenizer.json")
    if contents is None:
        raise CheckpointError(f"{path / 'tokenizer.json'}: no such file, and no other tokenizer is supported")
    config = _object(path, "tokenizer_config.json", read)
    tokens = {
        name: text
        for name, value in config.items()
        if name.endswith("_token") and (text := _token_text(value)) is not None
    }
    return TokenizerFiles(
        tokenizer_json=contents,
        bos_token=tokens.pop("bos_token", None),
        eos_token=tokens.pop("eos_token", None),
        eos_token_ids=_eos_token_ids(path, read),
        chat_template=read("chat_template.jinja") or _chat_template(config),
        other_special_tokens=tokens,
    )


def _reader(folder: Path) -> _Read:
    def read(name: str) -> str | None:
        try:
            return (folder / name).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{folder / name}: cannot be read: {error}") from None

    return read


def _object(path: Path, name: str, read: _Read) -> dict[str, Any]:
    """The object in the file `name`; empty when there is no such file."""
    contents = read(name)
    try:
        value = {} if contents is None else json.loads(contents)
    except ValueError as error:
        raise CheckpointError(f"{path / name}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path / name}: expected a JSON object, found {type(value).__name__}")
    return value


def _token_text(value: Any) -> str | None:
    """A special token is a string, or an object that carries it as `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _eos_token_ids(path: Path, read: _Read) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        value = _object(path, name, read).get("eos_token_id")
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if not all(type(token_id) is int for token_id in ids):
                raise CheckpointError(f"{path / name}: eos_token_id must be an id or a list of ids, not {value}")
            return tuple(ids)
    return ()


def _chat_template(config: dict[str, Any]) -> str | None:
    """A template, or the one called `default` of several."""
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
