"""Filling a shard: each parameter once, from its own ranges, and a file that does not fit is refused."""

import json
from collections.abc import Collection
from math import prod
from pathlib import Path

import gguf
import pytest
import torch
from torch import Tensor

from model_shards.errors import CheckpointError, PartitionError
from model_shards.layers.placement import Placement
from model_shards.partition import Span
from model_shards.registry import Model, build_model
from model_shards.weights import loader
from model_shards.weights.loader import fill, load_model, open_checkpoint
from model_shards.weights.names import StoredTensor
from tests.fakes.checkpoints import tiny_weights, write_tiny_llama
from tests.fakes.gguf_files import write_gguf
from tests.fakes.specs import tiny_spec
from tests.fakes.thread_group import ThreadGroup

CPU = torch.device("cpu")


class RecordingCheckpoint:
    """Gives every element its own position in its tensor, and remembers what was asked for."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.shapes = shapes
        self.reads: list[tuple[str, tuple[Span, ...]]] = []

    def check(self, tensors: Collection[str]) -> None:
        assert set(tensors) == self.shapes.keys()

    def file_of(self, tensor: str) -> Path:
        return Path("recorded")

    def place_of(self, tensor: str) -> StoredTensor:
        return StoredTensor(tensor)

    def shape_of(self, tensor: str) -> tuple[int, ...]:
        return self.shapes[tensor]

    def read(self, tensor: str, spans: tuple[Span, ...]) -> Tensor:
        self.reads.append((tensor, spans))
        positions = torch.arange(prod(self.shapes[tensor]), dtype=torch.float32).view(self.shapes[tensor])
        part: Tensor = positions[tuple(slice(span.start, span.stop) for span in spans)]
        return part

    def close(self) -> None: ...


SPEC = tiny_spec()


def filled(group: ThreadGroup) -> tuple[Model, RecordingCheckpoint]:
    model = build_model(SPEC, Placement(group, CPU, torch.float32))
    pieces = [piece for parameter in model.layout.values() for piece in parameter.pieces]
    checkpoint = RecordingCheckpoint({piece.tensor: piece.partition.shape for piece in pieces})
    fill(model, checkpoint, rank=group.rank, device=CPU, dtype=torch.float32)
    return model, checkpoint


def test_ranks_read_each_tensor_once_and_only_their_part() -> None:
    for group in ThreadGroup.of(2):
        _, checkpoint = filled(group)
        assert sorted(tensor for tensor, _ in checkpoint.reads) == sorted(checkpoint.shapes)
        reads = dict(checkpoint.reads)
        assert reads["layers.0.attention.key.weight"] == ((Span(0, 8), Span(8, 12))[group.rank], Span(0, 48))
        assert reads["layers.0.attention.output.weight"] == (Span(0, 48), (Span(0, 24), Span(24, 36))[group.rank])


def test_the_largest_parameters_are_filled_first() -> None:
    """While one is packed it is there twice: no matter, as long as others are still to come."""
    for group in ThreadGroup.of(2):
        model, checkpoint = filled(group)
        place = {tensor: index for index, (tensor, _) in enumerate(checkpoint.reads)}
        parameters = sorted(model.layout.values(), key=lambda parameter: place[parameter.pieces[0].tensor])
        sizes = [parameter.local_size(group.rank) for parameter in parameters]
        assert sizes == sorted(sizes, reverse=True)


def test_fused_rows_lie_in_the_order_of_the_pieces() -> None:
    model, _ = filled(ThreadGroup.of(2)[1])
    fused = model.get_submodule("layers.0.attention.qkv").dense_weight()  # type: ignore[operator]
    starts = [24 * 48, 8 * 48, 8 * 48]  # rank 1: query rows from 24, key and value rows from 8
    assert [float(fused[row, 0]) for row in (0, 12, 16)] == starts
    assert fused.shape == (20, 48)


def test_ranks_differ_and_reassemble_to_the_tensor() -> None:
    """Case 30: a rank that loads another's part has the right shape and the wrong numbers."""
    parts = [filled(group)[0].embedding.weight for group in ThreadGroup.of(3)]
    assert torch.equal(torch.cat(list(parts)), torch.arange(101 * 48, dtype=torch.float32).view(101, 48))


def test_large_tensors_are_read_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = filled(ThreadGroup.of(2)[1])
    monkeypatch.setattr(loader, "_ELEMENTS_AT_ONCE", 100)
    stepwise, checkpoint = filled(ThreadGroup.of(2)[1])
    assert max(prod(span.size for span in spans) for _, spans in checkpoint.reads) <= 100
    for name in ("layers.0.attention.qkv", "layers.0.mlp.down.shard", "head"):
        weights = [model.get_submodule(name).dense_weight() for model in (whole, stepwise)]  # type: ignore[operator]
        assert torch.equal(*weights)


@pytest.mark.parametrize("elements", [1, 97, 16 * 96, 40 * 96])
def test_steps_do_not_cut_through_heads_whose_rows_lie_in_pairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elements: int
) -> None:
    config = json.loads((write_tiny_llama(tmp_path) / "config.json").read_text())
    file = tmp_path / "m.gguf"
    stored = write_gguf(file, config, tiny_weights(config, 0), gguf.GGMLQuantizationType.Q8_0)
    monkeypatch.setattr(loader, "_ELEMENTS_AT_ONCE", elements)
    model = load_model(file, ThreadGroup.of(1)[0], device=CPU, dtype=torch.float32)
    qkv = model.get_submodule("layers.1.attention.qkv").dense_weight()  # type: ignore[operator]
    expected = [stored[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(qkv, torch.cat(expected))


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path)
    seen: list[tuple[int, int]] = []

    def note(done: int, total: int) -> None:
        seen.append((done, total))

    model = load_model(folder, ThreadGroup.of(2)[0], device=CPU, dtype=torch.bfloat16, on_progress=note)
    expected = sum(layout.local_size(0) for layout in model.layout.values()) * 2
    assert seen[-1] == (expected, expected)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_a_shape_that_is_not_the_configs_is_named(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 161}))
    message = r"model\.safetensors: tensor 'layers\.0\.mlp\.gate\.weight' has shape \[160, 96\], but .*161"
    with pytest.raises(CheckpointError, match=message):
        load_model(folder, ThreadGroup.of(1)[0], device=CPU, dtype=torch.float32)


def test_more_layers_in_the_config_than_in_the_file(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(CheckpointError, match=r"has no tensor 'model\.layers\.2\."):
        load_model(folder, ThreadGroup.of(1)[0], device=CPU, dtype=torch.float32)
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    with pytest.raises(CheckpointError, match=r"tensor 'model\.layers\.1\..* has no place"):
        load_model(folder, ThreadGroup.of(1)[0], device=CPU, dtype=torch.float32)


def test_a_parameter_that_no_layout_names_is_an_error() -> None:
    group = ThreadGroup.of(1)[0]
    model = build_model(SPEC, Placement(group, CPU, torch.float32))
    pieces = [piece for parameter in model.layout.values() for piece in parameter.pieces]
    checkpoint = RecordingCheckpoint({piece.tensor: piece.partition.shape for piece in pieces})
    model.layout = {name: layout for name, layout in model.layout.items() if name != "norm.weight"}
    with pytest.raises(CheckpointError, match=r"nothing fills the parameters \['norm\.weight'\]"):
        fill(model, checkpoint, rank=0, device=CPU, dtype=torch.float32)


def test_more_ranks_than_query_heads_are_refused(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path)
    with pytest.raises(PartitionError, match="6 query heads cannot be split over 7 ranks"):
        load_model(folder, ThreadGroup.of(7)[0], device=CPU, dtype=torch.float32)


def test_an_opened_checkpoint_reads_the_file(tmp_path: Path) -> None:
    spec, checkpoint = open_checkpoint(write_tiny_llama(tmp_path))
    assert checkpoint.shape_of("head.weight") == (spec.vocab_size, spec.hidden_size)
    checkpoint.close()
