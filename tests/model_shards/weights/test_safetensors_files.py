"""Safetensors folders, single and sharded: any range is read, and what is wrong is named with its file."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from model_shards.errors import CheckpointError
from model_shards.partition import Span
from model_shards.weights.safetensors_files import SafetensorsCheckpoint
from model_shards.weights.safetensors_index import check_files

EMBEDDING = torch.arange(60, dtype=torch.float32).reshape(10, 6)
NORM = torch.ones(6, dtype=torch.bfloat16)
TENSORS = ["embedding.weight", "norm.weight"]


def write(folder: Path, **extra: Tensor) -> Path:
    tensors = {"model.embed_tokens.weight": EMBEDDING, "model.norm.weight": NORM, **extra}
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_sharded(folder: Path) -> Path:
    save_file({"model.embed_tokens.weight": EMBEDDING}, folder / "a.safetensors")
    save_file({"model.norm.weight": NORM}, folder / "b.safetensors")
    write_index(folder, {"model.embed_tokens.weight": "a.safetensors", "model.norm.weight": "b.safetensors"})
    return folder


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("writer", [write, write_sharded])
def test_ranges_are_read_in_the_type_of_the_file(tmp_path: Path, writer: object) -> None:
    checkpoint = SafetensorsCheckpoint(writer(tmp_path), "llama")  # type: ignore[operator]
    checkpoint.check(TENSORS)
    assert checkpoint.shape_of("embedding.weight") == (10, 6)
    part = checkpoint.read("embedding.weight", (Span(2, 9), Span(1, 4)))
    assert torch.equal(part, EMBEDDING[2:9, 1:4])
    assert torch.equal(checkpoint.read("norm.weight", (Span(0, 4),)), NORM[:4])
    checkpoint.close()
    checkpoint.close()


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    checkpoint = SafetensorsCheckpoint(write(tmp_path), "llama")
    with pytest.raises(CheckpointError, match=r"has no tensor 'lm_head\.weight'"):
        checkpoint.check([*TENSORS, "head.weight"])


def test_a_tensor_that_the_model_would_ignore_is_refused(tmp_path: Path) -> None:
    write(tmp_path, **{"model.layers.0.self_attn.q_proj.bias": torch.ones(3)})
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor '.*q_proj\.bias' has no place"):
        SafetensorsCheckpoint(tmp_path, "llama").check(TENSORS)


def test_derived_frequencies_are_ignored(tmp_path: Path) -> None:
    write(tmp_path, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)})
    SafetensorsCheckpoint(tmp_path, "llama").check(TENSORS)


@pytest.mark.parametrize("kept", [0, 5, 60, -1])
def test_a_truncated_file_is_refused(tmp_path: Path, kept: int) -> None:
    file = write(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        SafetensorsCheckpoint(tmp_path, "llama")


def test_a_truncated_shard_is_refused_with_its_tensor(tmp_path: Path) -> None:
    file = write_sharded(tmp_path) / "b.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    checkpoint = SafetensorsCheckpoint(tmp_path, "llama")
    assert checkpoint.shape_of("embedding.weight") == (10, 6)
    with pytest.raises(CheckpointError, match=r"b\.safetensors: tensor 'norm\.weight'"):
        checkpoint.read("norm.weight", (Span(0, 6),))


def test_headers_alone_tell_of_a_shard_that_is_cut_short(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    check_files(tmp_path)
    file = tmp_path / "b.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(CheckpointError, match=r"b\.safetensors"):
        check_files(tmp_path)


def test_a_missing_shard_and_a_wrong_index_are_refused(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    write_index(tmp_path, {"model.embed_tokens.weight": "a.safetensors", "model.norm.weight": "a.safetensors"})
    with pytest.raises(CheckpointError, match=r"a\.safetensors: tensor 'norm\.weight'"):
        SafetensorsCheckpoint(tmp_path, "llama").shape_of("norm.weight")
    (tmp_path / "b.safetensors").unlink()
    write_index(tmp_path, {"model.norm.weight": "b.safetensors"})
    with pytest.raises(CheckpointError, match=r"puts 'model\.norm\.weight' in b\.safetensors, which is missing"):
        SafetensorsCheckpoint(tmp_path, "llama")


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": 3}', "{}"])
def test_a_broken_index_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match="is not an index"):
        SafetensorsCheckpoint(tmp_path, "llama")


def test_an_index_does_not_reach_outside_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write(tmp_path)
    write_index(folder, {"model.norm.weight": "../model.safetensors"})
    with pytest.raises(CheckpointError, match="outside its own folder"):
        SafetensorsCheckpoint(folder, "llama")


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02")
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        SafetensorsCheckpoint(tmp_path, "llama")


def test_integers_are_not_weights(tmp_path: Path) -> None:
    save_file({"model.norm.weight": torch.ones(6, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor 'norm\.weight' is torch\.int8"):
        SafetensorsCheckpoint(tmp_path, "llama").read("norm.weight", (Span(0, 6),))


def test_a_part_of_a_fused_tensor_that_lies_the_other_way_round(tmp_path: Path) -> None:
    fused = torch.arange(4 * 3 * 6, dtype=torch.float32).reshape(4, 3 * 6)  # [in, query + key + value]
    bias = torch.arange(3 * 6, dtype=torch.float32)
    names = ("transformer.h.0.attn.c_attn.weight", "transformer.h.0.attn.c_attn.bias")
    save_file(dict(zip(names, (fused, bias), strict=True)), tmp_path / "model.safetensors")
    checkpoint = SafetensorsCheckpoint(tmp_path, "gpt2")
    fused_names = ("query", "key", "value")
    checkpoint.check([f"layers.0.attention.{name}.{leaf}" for name in fused_names for leaf in ("weight", "bias")])
    assert checkpoint.shape_of("layers.0.attention.key.weight") == (6, 4)
    part = checkpoint.read("layers.0.attention.key.weight", (Span(2, 5), Span(1, 4)))
    assert torch.equal(part, fused.t()[6 + 2 : 6 + 5, 1:4])
    assert torch.equal(checkpoint.read("layers.0.attention.value.bias", (Span(0, 2),)), bias[12:14])
    checkpoint.close()
