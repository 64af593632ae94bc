"""A Hugging Face folder of safetensors, one file or several with an index, as a `Checkpoint`.

Knows file names and slices; knows nothing of ranks.
"""

from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from model_shards.errors import CheckpointError
from model_shards.partition import Span
from model_shards.spec import Architecture
from model_shards.weights.names import StoredTensor, hugging_face_tensor
from model_shards.weights.safetensors_index import find_tensors, is_derived

_BASE_MODEL = "transformer."  # what GPT-2's own first files leave away


class SafetensorsCheckpoint:
    """Reads canonical tensors of a folder. Files are opened when first needed and stay open until `close`."""

    def __init__(self, folder: Path, architecture: Architecture) -> None:
        self._folder = folder
        self._architecture = architecture
        self._files = find_tensors(folder)
        self._is_bare = architecture == "gpt2" and not any(name.startswith(_BASE_MODEL) for name in self._files)
        self._opened: dict[Path, Any] = {}
        self._exit = ExitStack()

    def check(self, tensors: Collection[str]) -> None:
        expected = {self.place_of(tensor).name for tensor in tensors}
        for name in expected - self._files.keys():
            raise CheckpointError(f"{self._folder}: has no tensor {name!r}")
        for name in self._files.keys() - expected:
            if not is_derived(name):
                raise CheckpointError(
                    f"{self._files[name]}: tensor {name!r} has no place in the model that config.json describes"
                )

    def file_of(self, tensor: str) -> Path:
        name = self.place_of(tensor).name
        if name not in self._files:
            raise CheckpointError(f"{self._folder}: has no tensor {name!r}")
        return self._files[name]

    def place_of(self, tensor: str) -> StoredTensor:
        stored = hugging_face_tensor(tensor, self._architecture)
        return replace(stored, name=stored.name.removeprefix(_BASE_MODEL)) if self._is_bare else stored

    def shape_of(self, tensor: str) -> tuple[int, ...]:
        stored = self.place_of(tensor)
        shape = tuple(self._slice(tensor).get_shape())
        shape = shape[::-1] if stored.transposed else shape
        if shape[0] % stored.num_parts:
            return shape  # fits no model
        return (shape[0] // stored.num_parts, *shape[1:])

    def read(self, tensor: str, spans: tuple[Span, ...]) -> Tensor:
        stored = self.place_of(tensor)
        start = stored.part * self.shape_of(tensor)[0]
        ranges = [slice(start + spans[0].start, start + spans[0].stop)]
        ranges += [slice(span.start, span.stop) for span in spans[1:]]
        part = self._slice(tensor)
        try:
            read: Tensor = part[tuple(ranges[::-1])].t() if stored.transposed else part[tuple(ranges)]
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
            return self._opened[path].get_slice(self.place_of(tensor).name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: tensor {tensor!r}: {error}") from error
