"""A Hugging Face folder of safetensors, one file or several with an index, as a `Checkpoint`.

Knows file names and slices; knows nothing of ranks.
"""

from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from model_shards.errors import CheckpointError
from model_shards.partition import Span
from model_shards.weights.names import hugging_face_name
from model_shards.weights.safetensors_index import find_tensors

_DERIVED_SUFFIXES = (".rotary_emb.inv_freq",)  # old exports hold it; it follows from the config


class SafetensorsCheckpoint:
    """Reads canonical tensors of a folder. Files are opened when first needed and stay open until `close`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = find_tensors(folder)
        self._opened: dict[Path, Any] = {}
        self._exit = ExitStack()

    def check(self, tensors: Collection[str]) -> None:
        expected = {hugging_face_name(tensor) for tensor in tensors}
        for name in expected - self._files.keys():
            raise CheckpointError(f"{self._folder}: has no tensor {name!r}")
        for name in self._files.keys() - expected:
            if not name.endswith(_DERIVED_SUFFIXES):
                raise CheckpointError(
                    f"{self._files[name]}: tensor {name!r} has no place in the model that config.json describes"
                )

    def file_of(self, tensor: str) -> Path:
        name = hugging_face_name(tensor)
        if name not in self._files:
            raise CheckpointError(f"{self._folder}: has no tensor {name!r}")
        return self._files[name]

    def shape_of(self, tensor: str) -> tuple[int, ...]:
        return tuple(self._slice(tensor).get_shape())

    def read(self, tensor: str, spans: tuple[Span, ...]) -> Tensor:
        part = self._slice(tensor)
        try:
            read: Tensor = part[tuple(slice(span.start, span.stop) for span in spans)]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.file_of(tensor)}: tensor {tensor!r}: {error}") from error
        if not read.is_floating_point():
            raise CheckpointError(
                f"{self.file_of(tensor)}: tensor {tensor!r} is {read.dtype}, not a floating type"
            )
        return read

    def close(self) -> None:
        self._opened.clear()
        self._exit.close()

    def _slice(self, tensor: str) -> Any:
        path = self.file_of(tensor)
        try:
            if path not in self._opened:
                self._opened[path] = self._exit.enter_context(safe_open(path, framework="pt"))
            return self._opened[path].get_slice(hugging_face_name(tensor))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: tensor {tensor!r}: {error}") from error
