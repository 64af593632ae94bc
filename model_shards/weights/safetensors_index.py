"""Which tensors a Hugging Face folder has, and in which of its safetensors files. Torch-free.

Knows file names and indexes; reads no weights.
"""

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from model_shards.errors import CheckpointError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
# Old exports hold them; they follow from the config: rotary frequencies, and GPT-2's causal mask.
_DERIVED_SUFFIXES = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


def find_tensors(folder: Path) -> dict[str, Path]:
    """Tensor name, as the files have it -> its file. Raises `CheckpointError` where there are no safetensors."""
    index = folder / _INDEX
    if index.is_file():
        return _read_index(index)
    single = folder / _SINGLE
    if not single.is_file():
        raise CheckpointError(f"{folder}: has neither {_SINGLE} nor {_INDEX}; other weight files are not read")
    return dict.fromkeys(_names_in(single), single)


def check_files(folder: Path) -> None:
    """Raises `CheckpointError` for a file without a header, or shorter than that says. Reads headers alone."""
    for path in sorted(set(find_tensors(folder).values())):
        _names_in(path)


def _names_in(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="numpy") as file:
            return list(file.keys())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def has_weights(folder: Path) -> bool:
    return (folder / _INDEX).is_file() or (folder / _SINGLE).is_file()


def is_derived(name: str) -> bool:
    """Whether a tensor of the files is no weight but follows from the config."""
    return name.endswith(_DERIVED_SUFFIXES)


def _read_index(index: Path) -> dict[str, Path]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {str(tensor): index.parent / str(file) for tensor, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: is not an index of safetensors files: {error!r}") from error
    for tensor, file in files.items():
        if file.parent != index.parent:
            raise CheckpointError(f"{index}: puts {tensor!r} outside its own folder, in {file}")
        if not file.is_file():
            raise CheckpointError(f"{index}: puts {tensor!r} in {file.name}, which is missing")
    return files
