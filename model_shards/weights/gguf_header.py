"""The header of a GGUF file: its metadata and where its tensors lie. Torch-free.

Metadata arrays (a tokenizer's 100,000 strings) are skipped, and parsed only when asked for: the whole header of
SmolLM2 takes 40 ms so, where `gguf.GGUFReader` takes 5 s. Format: github.com/ggml-org/ggml, docs/gguf.md.
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from model_shards.errors import CheckpointError

Scalar = int | float | bool | str
Value = Scalar | list["Value"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_SMALLEST_ALIGNMENT = 8
_STRING, _ARRAY = 8, 9
_SCALARS: Mapping[int, struct.Struct] = {
    code: struct.Struct(f"<{letter}")
    for code, letter in {
        0: "B",
        1: "b",
        2: "H",
        3: "h",
        4: "I",
        5: "i",
        6: "f",
        7: "?",
        10: "Q",
        11: "q",
        12: "d",
    }.items()
}
NO_WEIGHTS = ("rope_freqs.weight",)  # tensors that say how to compute, and belong to the spec
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_MAX_DIMENSIONS = 4

# type code -> (name, elements a block, bytes a block)
BLOCK_TYPES: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies. `shape` is in row-major order, outermost first, as everywhere in this project."""

    name: str
    shape: tuple[int, ...]
    block_type: str
    block_elements: int
    block_bytes: int
    offset: int  # bytes from the start of the file

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.block_elements * self.block_bytes

    @property
    def num_bytes(self) -> int:
        return prod(self.shape[:-1]) * self.row_bytes


class GgufHeader:
    """`fields` has every scalar; arrays are read by `array`. Invariant: every tensor lies inside the file."""

    def __init__(self, path: Path) -> None:
        """Raises `CheckpointError` when the file is not GGUF, is truncated or has a type that we cannot read."""
        self.path = path
        self.fields: dict[str, Scalar] = {}
        self.tensors: dict[str, GgufTensor] = {}
        self._arrays: dict[str, int] = {}
        with _mapped(path) as data:
            cursor = _Cursor(data, path)
            num_tensors, num_fields = cursor.preamble()
            for _ in range(num_fields):
                self._read_field(cursor)
            infos = [cursor.tensor_info() for _ in range(num_tensors)]
            alignment = self.fields.get("general.alignment", _DEFAULT_ALIGNMENT)
            if not isinstance(alignment, int) or alignment < 1 or alignment % _SMALLEST_ALIGNMENT:
                raise CheckpointError(f"{path}: general.alignment is {alignment!r}")
            start = -(-cursor.at // alignment) * alignment
            for info in infos:
                self._add_tensor(info, start, len(data))

    def array(self, key: str) -> list[Value]:
        """The elements of an array field; raises `KeyError` where there is no such array."""
        with _mapped(self.path) as data:
            return _Cursor(data, self.path, self._arrays[key]).array()

    def numbers(self, name: str) -> tuple[float, ...]:
        """The elements of a small float32 tensor. Raises `CheckpointError` for one of another type."""
        tensor = self.tensors[name]
        if tensor.block_type != "F32":
            raise CheckpointError(f"{self.path}: tensor {name!r} is {tensor.block_type}, not F32")
        with _mapped(self.path) as data:
            return struct.unpack_from(f"<{prod(tensor.shape)}f", data, tensor.offset)

    def has_array(self, key: str) -> bool:
        return key in self._arrays

    def _read_field(self, cursor: "_Cursor") -> None:
        key = cursor.string()
        kind = cursor.u32()
        if kind == _ARRAY:
            self._arrays[key] = cursor.at
            cursor.skip_array()
        else:
            self.fields[key] = cursor.scalar(kind)

    def _add_tensor(self, info: tuple[str, tuple[int, ...], int, int], data_start: int, file_size: int) -> None:
        name, shape, code, offset = info
        if code not in BLOCK_TYPES:
            raise CheckpointError(f"{self.path}: tensor {name!r} has GGUF type {code}, which we do not read")
        block_type, elements, block_bytes = BLOCK_TYPES[code]
        tensor = GgufTensor(name, shape, block_type, elements, block_bytes, data_start + offset)
        if shape[-1] % elements:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} has rows of {shape[-1]}, "
                f"not a multiple of {block_type}'s {elements}"
            )
        if offset % _SMALLEST_ALIGNMENT:
            raise CheckpointError(f"{self.path}: tensor {name!r} lies at odd offset {offset}")
        if tensor.offset + tensor.num_bytes > file_size:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} ends at byte {tensor.offset + tensor.num_bytes}, but the file has "
                f"{file_size} bytes: it is truncated"
            )
        if name in self.tensors:
            raise CheckpointError(f"{self.path}: tensor {name!r} is there twice")
        self.tensors[name] = tensor


def _mapped(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


class _Cursor:
    """Reads forward through the mapped header. Anything past the end is a truncated file."""

    def __init__(self, data: mmap.mmap, path: Path, at: int = 0) -> None:
        self._data = data
        self._path = path
        self.at = at

    def preamble(self) -> tuple[int, int]:
        if self._data[:4] != _MAGIC:
            raise CheckpointError(f"{self._path}: not a GGUF file (it starts with {self._data[:4]!r})")
        self.at = 4
        version = self.u32()
        if version not in _VERSIONS:
            raise CheckpointError(f"{self._path}: GGUF version {version}; we read versions 2 and 3, little-endian")
        return self.u64(), self.u64()

    def u32(self) -> int:
        return int(self._unpack(_U32))

    def u64(self) -> int:
        return int(self._unpack(_U64))

    def string(self) -> str:
        size = self.u64()
        self._need(size)
        text = self._data[self.at : self.at + size]
        self.at += size
        return text.decode("utf-8", errors="replace")

    def scalar(self, kind: int) -> Scalar:
        if kind == _STRING:
            return self.string()
        if kind not in _SCALARS:
            raise CheckpointError(f"{self._path}: unknown GGUF value type {kind} at byte {self.at}")
        return self._unpack(_SCALARS[kind])

    def array(self) -> list[Value]:
        kind, count = self.u32(), self.u64()
        if kind == _ARRAY:
            return [self.array() for _ in range(count)]
        return [self.scalar(kind) for _ in range(count)]

    def skip_array(self) -> None:
        kind, count = self.u32(), self.u64()
        if kind in _SCALARS:
            self._need(count * _SCALARS[kind].size)
            self.at += count * _SCALARS[kind].size
        elif kind == _STRING:
            self._skip_strings(count)
        elif kind == _ARRAY:
            for _ in range(count):
                self.skip_array()
        else:
            raise CheckpointError(f"{self._path}: unknown GGUF value type {kind} at byte {self.at}")

    def tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        num_dimensions = self.u32()
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise CheckpointError(f"{self._path}: tensor {name!r} has {num_dimensions} dimensions")
        innermost_first = [self.u64() for _ in range(num_dimensions)]
        return name, tuple(reversed(innermost_first)), self.u32(), self.u64()

    def _skip_strings(self, count: int) -> None:
        data, at, end, unpack, seen = self._data, self.at, len(self._data), _U64.unpack_from, 0
        for _ in range(count):
            if at + _U64.size > end:
                break
            at += _U64.size + unpack(data, at)[0]
            seen += 1
        self.at = at
        self._need(0 if seen == count else _U64.size)

    def _unpack(self, form: struct.Struct) -> Scalar:
        self._need(form.size)
        value: Scalar = form.unpack_from(self._data, self.at)[0]
        self.at += form.size
        return value

    def _need(self, size: int) -> None:
        if self.at + size > len(self._data):
            raise CheckpointError(
                f"{self._path}: the header is cut off at byte {len(self._data)}: it is truncated"
            )
