"""The shard proof: every family and format adds up on any number of ranks, and every fault is caught and named."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from model_shards.errors import CheckpointError
from model_shards.group import SingleRank
from model_shards.layers import linear
from model_shards.layers.linear import Linear
from model_shards.layers.placement import Placement
from model_shards.partition import Span
from model_shards.registry import Model
from model_shards.weights import packed_rows
from model_shards.weights.checksum import column_weights, row_sums
from model_shards.weights.file_sums import differing, file_sums
from model_shards.weights.holdings import holdings_of
from model_shards.weights.loader import load_model
from model_shards.weights.packed_rows import weight_row_sums
from model_shards.weights.proof import Checksum, Holding, add_up, refusal, unproved
from tests.fakes.checkpoints import tiny_weights, write_tiny_model
from tests.fakes.gguf_files import write_gguf
from tests.fakes.thread_group import run_ranks

CPU = torch.device("cpu")
PREFIX = "the weights in memory are not those of the files: "
Tamper = Callable[[list[Model]], None]  # with the ranks' models, once all are loaded

FOLDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, one KV head, odd FFN": ("llama", {"num_key_value_heads": 1, "intermediate_size": 67}),
    "llama, biases, tied": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {"head_dim": ...}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3_moe": ("qwen3_moe", {}),
    "mixtral": ("mixtral", {}),
    "gpt2": ("gpt2", {}),
    "gpt2, 5 heads, untied": ("gpt2", {"n_head": 5, "n_embd": 80, "tie_word_embeddings": False}),
}


def loaded(
    path: Path, ranks: int, dtype: torch.dtype = torch.float32, shard_weights: tuple[int, ...] = ()
) -> list[Model]:
    return run_ranks(
        ranks,
        lambda group: load_model(path, group, device=CPU, dtype=dtype, shard_weights=shard_weights),
    )


def held_by(models: Sequence[Model], path: Path) -> list[tuple[Holding, ...]]:
    with torch.inference_mode():
        return [holdings_of(model, path, rank) for rank, model in enumerate(models)]


def summed(path: Path, shares: int, dtype: torch.dtype = torch.float32) -> dict[str, Checksum]:
    return add_up(file_sums(path, dtype, share=share, num_shares=shares) for share in range(shares))


def verdict(path: Path, models: Sequence[Model]) -> str:
    """What a cluster of these ranks would be refused with; empty when it is proved."""
    ranks = held_by(models, path)
    wrong = unproved(ranks, summed(path, len(models)))
    blamed = {
        f"rank {rank}": differing(held, wrong, path, torch.float32) for rank, held in enumerate(ranks) if wrong
    }
    return refusal(wrong, blamed) if wrong else ""


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", FOLDERS)
def test_every_family_is_proved(tmp_path: Path, name: str, ranks: int) -> None:
    family, overrides = FOLDERS[name]
    folder = write_tiny_model(tmp_path, family, **overrides)
    assert verdict(folder, loaded(folder, ranks)) == ""


@pytest.mark.parametrize("quantisation", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_gguf_files_are_proved(tmp_path: Path, family: str, quantisation: str, ranks: int) -> None:
    """Query and key rows of `llama` files are permuted, biases with them; those of `qwen2` are not."""
    config = json.loads(
        (
            write_tiny_model(tmp_path, family, num_key_value_heads=3, tie_word_embeddings=True) / "config.json"
        ).read_text()
    )
    write_gguf(tmp_path / "m.gguf", config, tiny_weights(config, 0), gguf.GGMLQuantizationType[quantisation])
    assert verdict(tmp_path / "m.gguf", loaded(tmp_path / "m.gguf", ranks)) == ""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_that_are_rounded_while_loading_are_proved(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = write_tiny_model(tmp_path, "llama")
    assert unproved(held_by(loaded(folder, 2, dtype), folder), summed(folder, 2, dtype)) == {}


def test_plain_weights_are_proved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "packing_works", lambda out_features, in_features: False)
    folder = write_tiny_model(tmp_path, "llama", tie_word_embeddings=True)
    assert verdict(folder, loaded(folder, 2)) == ""


def test_unequal_shards_are_proved(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "llama", num_key_value_heads=6)
    models = loaded(folder, 2, shard_weights=(3, 1))
    assert [model.num_local_query_heads for model in models] == [5, 1]
    assert verdict(folder, models) == ""


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float64])
def test_several_files_of_other_types_are_proved(tmp_path: Path, stored: torch.dtype) -> None:
    folder = write_tiny_model(tmp_path, "llama")
    weights = tiny_weights(json.loads((folder / "config.json").read_text()), seed=0)
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, tensors in files.items():
        save_file({name: weights[name].to(stored) for name in tensors}, folder / file)
    weight_map = {name: file for file, tensors in files.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert verdict(folder, loaded(folder, 2)) == ""


@pytest.mark.parametrize("shares", [1, 2, 3, 7])
def test_the_shares_of_a_reading_add_up_to_the_same(tmp_path: Path, shares: int) -> None:
    folder = write_tiny_model(tmp_path, "gpt2")
    assert summed(folder, shares) == file_sums(folder, torch.float32, share=0, num_shares=1)


def swapped(module: str) -> Tamper:
    def tamper(models: list[Model]) -> None:
        first, second = (dense(model, module) for model in models)
        put(models[0], module, second)
        put(models[1], module, first)

    return tamper


def duplicated(module: str) -> Tamper:
    return lambda models: put(models[1], module, dense(models[0], module))


def flipped(module: str, row: int, column: int, bit: int) -> Tamper:
    def tamper(models: list[Model]) -> None:
        values = dense(models[1], module)
        bits = values.view(torch.int32).view(-1, values.shape[-1])
        bits[row, column] ^= -(2**31) if bit == 31 else 1 << bit
        put(models[1], module, values)

    return tamper


def zeroed(module: str) -> Tamper:
    return lambda models: put(models[0], module, torch.zeros_like(dense(models[0], module)))


def dense(model: Model, module: str) -> Tensor:
    """A copy of the weight that is multiplied with."""
    found = model.get_submodule(module)
    return (found.dense_weight() if isinstance(found, Linear) else found.get_parameter("weight")).detach().clone()


def put(model: Model, module: str, weight: Tensor) -> None:
    """Replace what the module multiplies with, packed again where it was packed."""
    found = model.get_submodule(module)
    found.register_parameter("weight", nn.Parameter(weight, requires_grad=False))
    if isinstance(found, Linear):
        found.prepare()


QKV, DOWN = "layers.1.attention.qkv", "layers.0.mlp.down.shard"
FAULTS: dict[str, tuple[Tamper, set[tuple[int, str]]]] = {
    # what is done -> who must be blamed, and for which tensors
    "shards swapped, by rows": (swapped(QKV), {(rank, f"{name}_proj") for rank in (0, 1) for name in "qkv"}),
    "shards swapped, by columns": (swapped(DOWN), {(0, "down_proj"), (1, "down_proj")}),
    "a shard duplicated, by rows": (duplicated(QKV), {(1, f"{name}_proj") for name in "qkv"}),
    "a shard duplicated, by columns": (duplicated(DOWN), {(1, "down_proj")}),
    "the lowest bit of a number flipped": (flipped(QKV, 100, 95, 0), {(1, "v_proj")}),
    "the sign of a number flipped": (flipped(DOWN, 3, 17, 31), {(1, "down_proj")}),
    "a bit of the head flipped": (flipped("head", 8, 1, 22), {(1, "lm_head")}),
    "a bit of a norm flipped": (flipped("norm", 0, 5, 3), {(1, "norm")}),
    "left as zeros": (zeroed(DOWN), {(0, "down_proj")}),
}


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_caught_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, packed: bool
) -> None:
    if not packed:
        monkeypatch.setattr(linear, "packing_works", lambda out_features, in_features: False)
    tamper, blamed = FAULTS[fault]
    folder = write_tiny_model(tmp_path, "llama", num_key_value_heads=6)
    models = loaded(folder, 2)
    tamper(models)
    ranks = held_by(models, folder)
    wrong = unproved(ranks, summed(folder, 2))
    found = {
        (rank, holding.tensor.split(".")[-2])
        for rank, held in enumerate(ranks)
        for holding in differing(held, wrong, folder, torch.float32)
    }
    assert found == blamed
    assert {tensor.split(".")[-2] for tensor in wrong} == {tensor for _, tensor in blamed}


def test_the_packed_copy_of_a_tied_head_is_proved_too(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "llama", tie_word_embeddings=True)
    models = loaded(folder, 2)
    if models[1].head.weight is not None:
        pytest.skip("this build of torch does not pack weights")
    flipped("head", 8, 1, 22)(models)
    message = verdict(folder, models)
    assert message.startswith(
        f"{PREFIX}rank 1: head.weight is not what 'model.embed_tokens.weight' has in rows 496-"
    )


def test_a_shared_kv_head_that_differs_on_one_rank_is_named(tmp_path: Path) -> None:
    """Three ranks share one KV head: its rows count once, and every copy must be right."""
    folder = write_tiny_model(tmp_path, "llama", num_key_value_heads=1)
    models = loaded(folder, 3)
    flipped(QKV, 32 + 15, 0, 1)(models)  # two query heads, then the key
    message = verdict(folder, models)
    assert message == (
        f"{PREFIX}rank 1: {QKV}.weight is not what 'model.layers.1.self_attn.k_proj.weight' "
        "has in rows 0-16 and columns 0-96"
    )


def test_a_parameter_that_was_never_filled_is_named(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "llama")
    models = loaded(folder, 2)
    bare = models[1].get_submodule("layers.0.mlp_norm")
    bare.register_parameter("weight", linear.empty_parameter(96, dtype=torch.float32))
    with pytest.raises(
        CheckpointError, match=r"rank 1: the parameter 'layers\.0\.mlp_norm\.weight' was not filled"
    ):
        held_by(models, folder)


def test_two_ranks_that_both_take_themselves_for_the_first(tmp_path: Path) -> None:
    """Each holds what it says it holds, and half of every tensor is nobody's."""
    folder = write_tiny_model(tmp_path, "llama")
    [first, _] = loaded(folder, 2)
    ranks = [holdings_of(first, folder, 0)] * 2
    wrong = unproved(ranks, summed(folder, 2))
    assert wrong["model.layers.0.mlp.up_proj.weight"] == "the parts that the ranks hold do not add up to it"
    assert "model.norm.weight" not in wrong
    assert not any(differing(held, wrong, folder, torch.float32) for held in ranks)
    assert "'lm_head.weight': the parts that the ranks hold do not" in refusal(wrong, {})


def test_a_file_that_changed_after_it_was_read_is_caught(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "llama", seed=0)
    models = loaded(folder, 2)
    write_tiny_model(folder, "llama", seed=1)
    assert "rank 0: embedding.weight is not what 'model.embed_tokens.weight' has" in verdict(folder, models)


def test_packed_weights_are_summed_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks of any number of rows, with padding in both directions; else unpacked."""
    placement = Placement(SingleRank(), CPU, torch.float32)
    for outputs, inputs in [(96, 96), (144, 96), (507, 96), (5, 3), (8, 67), (65, 33), (640, 130)]:
        weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(outputs))
        layer = Linear(outputs, inputs, placement)
        layer.register_parameter("weight", nn.Parameter(weight, requires_grad=False))
        expected = row_sums(weight, column_weights(inputs))
        layer.prepare()
        assert torch.equal(weight_row_sums(layer, column_weights(inputs)), expected)
        with monkeypatch.context() as patch:
            patch.setattr(packed_rows, "_block_rows", lambda out_features, in_features: None)
            assert torch.equal(weight_row_sums(layer, column_weights(inputs)), expected)


def test_tensors_without_a_holder_and_holders_without_a_tensor() -> None:
    whole = Span(0, 4)
    held = [Holding("a", whole, whole, "p", (7, 8)), Holding("b", whole, whole, "q", (1, 1))]
    assert unproved([held], {"a": (7, 8), "c": (3, 3)}) == {"b": "it is not in the files", "c": "no rank holds it"}


def test_a_long_message_is_cut() -> None:
    wrong = {f"t{number}": "its copies differ" for number in range(9)}
    assert refusal(wrong, {}).endswith("; 't4': its copies differ; and 4 more")


def test_a_header_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{x")
    index = {"weight_map": {"a": "model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: its header cannot be read"):
        file_sums(tmp_path, torch.float32, share=0, num_shares=1)
