"""Weight files as a loader sees them: named tensors of which any range can be read, whatever the format.

Knows canonical names and shapes; what a file calls a tensor, and how it stores it, is the implementation's
business.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Protocol

from torch import Tensor

from model_shards.partition import Span
from model_shards.weights.names import StoredTensor


class Checkpoint(Protocol):
    """Opened weight files. Every method raises `CheckpointError` naming the file and the tensor."""

    def check(self, tensors: Collection[str]) -> None:
        """Refuse files that lack one of `tensors`, or that hold weights which a model of these would ignore."""
        ...

    def file_of(self, tensor: str) -> Path: ...

    def place_of(self, tensor: str) -> StoredTensor: ...

    def shape_of(self, tensor: str) -> tuple[int, ...]: ...

    def read(
        self,
        tensor: str,
        spans: tuple[Span, ...],  # one for each dimension
    ) -> Tensor:  # a floating dtype, that of the file where it can be; may share the file's memory
        """The part of a tensor that `spans` name, in the row order of the model, reading no more than it must."""
        ...

    def close(self) -> None: ...
