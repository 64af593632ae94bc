"""Checksums of all tensors of a model's files, by a reading of its own: the other side of the shard proof.

Shares no code with what loads a rank: safetensors headers are parsed here, GGUF blocks are decoded by the `gguf`
package, and rows are read in file order, whoever holds them. Ranks share the work by rows, and a rank's threads by
tensors. Knows file formats and positions; knows nothing of partitions, layouts or models.
"""

import json
import mmap
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model_shards.errors import CheckpointError
from model_shards.partition import Span
from model_shards.weights.checksum import add_rows, column_weights, counts_alike, row_sums, row_weights
from model_shards.weights.gguf_header import NO_WEIGHTS, GgufHeader
from model_shards.weights.proof import Checksum, Holding
from model_shards.weights.safetensors_index import find_tensors, is_derived

_SAFETENSORS_TYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_AT_ONCE = 2**24  # elements, of what is summed as it lies in the file
_CONVERTED_AT_ONCE = 2**17  # of what is converted or decoded, which should stay in the cache
_LENGTH_BYTES = 8  # of a safetensors header's length, which comes first


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor's bytes as a matrix: a vector is one column."""

    name: str
    shape: tuple[int, int]
    data: Tensor  # [rows, bytes a row] uint8, mapped; of a vector, all in one row
    kind: str  # in the words of its format
    is_gguf: bool

    @property
    def dtype(self) -> torch.dtype | None:
        """What it is stored as; None for what must be decoded."""
        return None if self.is_gguf else _SAFETENSORS_TYPES[self.kind]

    def rows(self, span: Span) -> Tensor:  # [rows, columns], a floating type
        if len(self.data) == self.shape[0]:
            return self._decoded(self.data[span.start : span.stop]).view(span.size, self.shape[1])
        return self._decoded(self.data).view(self.shape)[span.start : span.stop]

    def _decoded(self, raw: Tensor) -> Tensor:
        if self.dtype is None:
            return _decode_with_gguf(raw, self.kind)
        is_aligned = raw.storage_offset() % self.dtype.itemsize == 0
        return (raw if is_aligned else raw.clone()).view(self.dtype)


def file_sums(path: Path, dtype: torch.dtype, *, share: int, num_shares: int) -> dict[str, Checksum]:
    """File tensor -> checksum of the rows that fall to `share`, as numbers of `dtype`.

    The shares of all ranks add up to whole tensors. Raises `CheckpointError`.
    """

    def sum_of(tensor: RawTensor) -> tuple[str, Checksum] | None:
        num_rows, num_columns = tensor.shape
        start, stop = (num_rows * part // num_shares for part in (share, share + 1))
        if start == stop:
            return None
        return tensor.name, _checksum(tensor, Span(start, stop), Span(0, num_columns), dtype)

    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        return dict(found for found in threads.map(sum_of, _raw_tensors(path)) if found is not None)


def differing(
    holdings: Collection[Holding], tensors: Collection[str], path: Path, dtype: torch.dtype
) -> tuple[Holding, ...]:
    """Those of `holdings` in `tensors` that the files contradict: who is to blame when sums do not agree."""
    suspects = [holding for holding in holdings if holding.tensor in tensors]
    found = {tensor.name: tensor for tensor in _raw_tensors(path)} if suspects else {}
    return tuple(
        holding
        for holding in suspects
        if holding.tensor not in found
        or _checksum(found[holding.tensor], holding.rows, holding.columns, dtype) != holding.checksum
    )


def _checksum(tensor: RawTensor, rows: Span, columns: Span, dtype: torch.dtype) -> Checksum:
    num_rows, num_columns = tensor.shape
    weights = column_weights(num_columns)[columns.start : columns.stop]
    as_it_lies = tensor.dtype is not None and counts_alike(tensor.dtype, dtype)
    rows_each = max(1, (_AT_ONCE if as_it_lies else _CONVERTED_AT_ONCE) // num_columns)
    sums = []
    for start in range(rows.start, rows.stop, rows_each):
        values = tensor.rows(Span(start, min(start + rows_each, rows.stop)))[:, columns.start : columns.stop]
        sums.append(row_sums(values if as_it_lies else values.to(dtype), weights))
    return add_rows(torch.cat(sums), row_weights(num_rows)[:, rows.start : rows.stop])


def _raw_tensors(path: Path) -> Iterator[RawTensor]:
    """Of one file after the other, each mapped as long as a tensor of it is in use."""
    if not path.is_dir():
        yield from _gguf_tensors(path)
        return
    for file in sorted(set(find_tensors(path).values())):
        yield from _safetensors_tensors(file)


def _safetensors_tensors(file: Path) -> Iterator[RawTensor]:
    content = _mapped(file)
    length = int.from_bytes(content[:_LENGTH_BYTES].numpy().tobytes(), "little")
    data_start = _LENGTH_BYTES + length
    for name, entry in _parsed(file, content[_LENGTH_BYTES:data_start]).items():
        if name == "__metadata__" or is_derived(name):
            continue
        shape, (start, stop), kind = entry["shape"], entry["data_offsets"], entry["dtype"]
        if kind not in _SAFETENSORS_TYPES or len(shape) not in (1, 2):
            raise CheckpointError(f"{file}: tensor {name!r} is {kind} of shape {shape}, which is no weight")
        data = content[data_start + start : data_start + stop]
        yield RawTensor(name, *_as_matrix(shape, data), kind, is_gguf=False)


def _parsed(file: Path, header: Tensor) -> dict[str, Any]:
    try:
        parsed: dict[str, Any] = json.loads(header.numpy().tobytes())
    except ValueError as error:
        raise CheckpointError(f"{file}: its header cannot be read: {error}") from error
    return parsed


def _gguf_tensors(path: Path) -> Iterator[RawTensor]:
    content = _mapped(path)
    for name, info in GgufHeader(path).tensors.items():
        if name not in NO_WEIGHTS:
            data = content[info.offset : info.offset + info.num_bytes]
            yield RawTensor(name, *_as_matrix(info.shape, data), info.block_type, is_gguf=True)


def _as_matrix(shape: Sequence[int], data: Tensor) -> tuple[tuple[int, int], Tensor]:
    """The shape, and the bytes by rows."""
    if len(shape) == 1:
        return (shape[0], 1), data.view(1, -1)
    return (shape[0], shape[1]), data.view(shape[0], -1)


def _mapped(file: Path) -> Tensor:  # [bytes] uint8
    try:
        with file.open("rb") as stream:
            # A private mapping, because torch wants a writable buffer; nothing is written, so nothing is copied.
            return torch.frombuffer(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise CheckpointError(f"{file}: cannot be read: {error}") from error


def _decode_with_gguf(raw: Tensor, kind: str) -> Tensor:  # flat, float32
    # Imported here because a machine that runs no GGUF files need not have it.
    from gguf import GGMLQuantizationType, quants

    # As one row: the package decodes few rows at a time, and a row is a row of blocks to it.
    blocks = raw.contiguous().view(1, -1).numpy()
    return torch.from_numpy(quants.dequantize(blocks, GGMLQuantizationType[kind])).view(-1)
