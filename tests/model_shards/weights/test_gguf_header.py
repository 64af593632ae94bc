"""The header reader agrees with the `gguf` package, and names what is wrong with a damaged file."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from model_shards.errors import CheckpointError
from model_shards.weights.gguf_header import GgufHeader


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """One field of every kind, and three tensors."""
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -3)
    writer.add_uint16("u16", 60_000)
    writer.add_int16("i16", -30_000)
    writer.add_uint32("u32", 4_000_000_000)
    writer.add_int32("i32", -2_000_000_000)
    writer.add_uint64("u64", 2**63)
    writer.add_int64("i64", -(2**62))
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "héllo")
    writer.add_array("strings", ["", "a", "漢字"])
    writer.add_array("numbers", [1, 2, 3])
    writer.add_array("lists", [[1, 2], [3]])
    writer.add_tensor("plain", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.add_tensor("vector", np.arange(5, dtype=np.float16))
    blocks = gguf.quants.quantize(np.ones((2, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("blocks", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_fields_and_arrays(file: Path) -> None:
    header = GgufHeader(file)
    assert header.fields == {
        "general.architecture": "llama",
        "u8": 200,
        "i8": -3,
        "u16": 60_000,
        "i16": -30_000,
        "u32": 4_000_000_000,
        "i32": -2_000_000_000,
        "u64": 2**63,
        "i64": -(2**62),
        "f32": 0.5,
        "f64": 0.1,
        "yes": True,
        "text": "héllo",
    }
    assert header.array("strings") == ["", "a", "漢字"]
    assert header.array("numbers") == [1, 2, 3]
    assert header.array("lists") == [[1, 2], [3]]
    assert header.has_array("strings")
    assert not header.has_array("text")
    with pytest.raises(KeyError):
        header.array("text")


def test_tensors_lie_where_the_gguf_package_finds_them(file: Path) -> None:
    header = GgufHeader(file)
    data = file.read_bytes()
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    assert header.tensors.keys() == tensors.keys()
    for name, tensor in header.tensors.items():
        assert tensor.shape == tuple(reversed(tensors[name].shape.tolist()))
        assert tensor.block_type == tensors[name].tensor_type.name
        assert data[tensor.offset : tensor.offset + tensor.num_bytes] == tensors[name].data.tobytes()


def test_every_truncation_is_noticed(file: Path, tmp_path: Path) -> None:
    data = file.read_bytes()
    last = max(tensor.offset + tensor.num_bytes for tensor in GgufHeader(file).tensors.values())
    short = tmp_path / "short.gguf"
    for size in range(last):
        short.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match=r"short\.gguf: .*(truncated|not a GGUF file|cannot be read)"):
            GgufHeader(short)


def test_a_truncated_tensor_is_named(file: Path) -> None:
    last = max(GgufHeader(file).tensors.values(), key=lambda tensor: tensor.offset)
    file.write_bytes(file.read_bytes()[: last.offset + last.num_bytes - 1])
    with pytest.raises(CheckpointError, match=f"tensor {last.name!r} ends at byte .* but the file has"):
        GgufHeader(file)


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (0, b"PK\x03\x04", "not a GGUF file"),
        (4, struct.pack("<I", 1), "GGUF version 1"),
        (4, struct.pack(">I", 3), "GGUF version 50331648"),
        (8, struct.pack("<Q", 2**40), r"has \d+ dimensions|truncated"),
        (16, struct.pack("<Q", 2**40), "GGUF value type|truncated"),
        (24, struct.pack("<Q", 2**60), "truncated"),
    ],
)
def test_a_damaged_header_is_refused(file: Path, offset: int, value: bytes, message: str) -> None:
    data = bytearray(file.read_bytes())
    data[offset : offset + len(value)] = value
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        GgufHeader(file)


def test_a_missing_file_and_an_unknown_type_are_refused(file: Path) -> None:
    with pytest.raises(CheckpointError, match=r"absent\.gguf: cannot be read"):
        GgufHeader(file.parent / "absent.gguf")
    data = file.read_bytes()
    at = data.index(b"plain") + len(b"plain") + 4 + 2 * 8
    file.write_bytes(data[:at] + struct.pack("<I", 16) + data[at + 4 :])
    with pytest.raises(CheckpointError, match="tensor 'plain' has GGUF type 16"):
        GgufHeader(file)
