"""A GGUF file as a `Checkpoint`: mapped, and decoded only where a rank asks.

Knows how the format orders and names things: whole quantisation blocks are read and trimmed, and `llama` files
hold query and key rows in another order (pairs of the rotation side by side), which is undone for each head.
"""

import mmap
from collections.abc import Collection
from pathlib import Path

import torch
from torch import Tensor

from model_shards.errors import CheckpointError
from model_shards.partition import Span
from model_shards.weights.gguf_blocks import decode_blocks
from model_shards.weights.gguf_header import NO_WEIGHTS, GgufHeader, GgufTensor
from model_shards.weights.names import StoredTensor, gguf_name

_INTERLEAVING_ARCHITECTURES = ("llama",)
_INTERLEAVED = (".attention.query.", ".attention.key.")


class GgufCheckpoint:
    """Reads canonical tensors of one file. The file stays mapped until `close`."""

    def __init__(self, header: GgufHeader, head_dim: int) -> None:
        self._path = header.path
        self._header = header
        self._head_dim = head_dim
        self._interleaves = header.fields.get("general.architecture") in _INTERLEAVING_ARCHITECTURES
        with header.path.open("rb") as file:
            # A private mapping, because torch wants a writable buffer; nothing is written, so nothing is copied.
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._bytes: Tensor | None = torch.frombuffer(mapped, dtype=torch.uint8)

    def check(self, tensors: Collection[str]) -> None:
        expected = {gguf_name(tensor): tensor for tensor in tensors}
        for name, tensor in expected.items():
            if name not in self._header.tensors:
                raise CheckpointError(f"{self._path}: has no tensor {name!r} ({tensor})")
        for name in self._header.tensors:
            if name not in expected and name not in NO_WEIGHTS:
                raise CheckpointError(f"{self._path}: tensor {name!r} has no place in this architecture")

    def file_of(self, tensor: str) -> Path:
        return self._path

    def place_of(self, tensor: str) -> StoredTensor:
        is_interleaved = self._interleaves and any(name in tensor for name in _INTERLEAVED)
        return StoredTensor(gguf_name(tensor), interleaved=self._head_dim if is_interleaved else 0)

    def shape_of(self, tensor: str) -> tuple[int, ...]:
        return self._tensor(tensor).shape

    def read(self, tensor: str, spans: tuple[Span, ...]) -> Tensor:
        info = self._tensor(tensor)
        rows, columns = spans if len(spans) == 2 else (Span(0, 1), spans[0])
        part = self._read_block_range(info, rows, columns)
        if head_dim := self.place_of(tensor).interleaved:
            return _separate_halves(part.view(-1) if len(spans) == 1 else part, head_dim)
        return part.view(-1) if len(spans) == 1 else part

    def close(self) -> None:
        self._bytes = None  # the mapping goes with the last tensor that looks into it

    def _tensor(self, tensor: str) -> GgufTensor:
        name = gguf_name(tensor)
        if name not in self._header.tensors:
            raise CheckpointError(f"{self._path}: has no tensor {name!r} ({tensor})")
        return self._header.tensors[name]

    def _read_block_range(self, info: GgufTensor, rows: Span, columns: Span) -> Tensor:
        """The whole blocks that hold `columns`, decoded and trimmed."""
        if self._bytes is None:
            raise CheckpointError(f"{self._path}: closed")
        elements = info.block_elements
        first, last = columns.start // elements, -(-columns.stop // elements)
        raw = self._bytes[info.offset : info.offset + info.num_bytes].view(-1, info.row_bytes)
        raw = raw[rows.start : rows.stop, first * info.block_bytes : last * info.block_bytes]
        decoded = decode_blocks(raw, info.block_type, info.block_bytes)
        return decoded[:, columns.start - first * elements : columns.stop - first * elements]


def _separate_halves(
    rows: Tensor,  # [heads * head_dim, ...], each head's rotation pairs side by side
    head_dim: int,
) -> Tensor:  # the same rows, each head's first halves of the pairs, then the second
    pairs = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).flatten(0, 2)
