"""What one rank really has in memory, mapped back to the tensors of the files: its side of the shard proof.

Reads the parameters that the model multiplies with, packed ones too, after everything that loading does to them.
Where a row of the model lies in a file is worked out here by index, not by undoing what the readers do.
Knows models, layouts and places; reads no weight files.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from model_shards.errors import CheckpointError
from model_shards.layers.linear import Linear
from model_shards.partition import ParameterLayout, Piece, Span
from model_shards.registry import Model
from model_shards.weights.checkpoint import Checkpoint
from model_shards.weights.checksum import add_rows, column_weights, row_sums, row_weights
from model_shards.weights.loader import open_checkpoint
from model_shards.weights.names import StoredTensor
from model_shards.weights.packed_rows import weight_row_sums
from model_shards.weights.proof import Holding


def holdings_of(model: Model, path: Path, rank: int) -> tuple[Holding, ...]:
    """Every part of a file tensor in the memory of `rank`, with its checksum.

    `path` is where the model was loaded from. Raises `CheckpointError` naming a parameter that was never filled.
    """
    _, checkpoint = open_checkpoint(path)

    def held_as(parameter: tuple[str, ParameterLayout]) -> list[Holding]:
        return _holdings_in(model, *parameter, rank, checkpoint)

    is_on_cpu = model.embedding.weight.device.type == "cpu"
    with closing(checkpoint), ThreadPoolExecutor(torch.get_num_threads() if is_on_cpu else 1) as threads:
        return tuple(chain.from_iterable(threads.map(held_as, _parameters(model))))


def _parameters(model: Model) -> Iterator[tuple[str, ParameterLayout]]:
    yield from model.layout.items()
    if "head.weight" not in model.layout and model.head.weight is not model.embedding.weight:
        # A tied head that was packed: a copy of the embedding, in memory of its own.
        yield "head.weight", model.layout["embedding.weight"]


def _holdings_in(
    model: Model, name: str, layout: ParameterLayout, rank: int, checkpoint: Checkpoint
) -> list[Holding]:
    path, leaf = name.rsplit(".", 1)
    module = model.get_submodule(path)
    parts = [_Part.of(piece, rank, checkpoint.place_of(piece.tensor)) for piece in layout.pieces]
    # The pieces of one parameter have the same columns, so that one pass serves all.
    if isinstance(module, Linear) and leaf == "weight":
        _check_filled(module.weight, name, rank)
        sums = torch.stack([weight_row_sums(module, weights) for weights in parts[0].input_weights])
    else:
        parameter = module.get_parameter(leaf).detach()
        _check_filled(parameter, name, rank)
        matrix = parameter.view(len(parameter), -1)
        sums = torch.stack([row_sums(matrix, weights) for weights in parts[0].input_weights])
    by_part = torch.split(sums, [part.output_weights.shape[1] for part in parts], dim=1)
    return [
        Holding(part.tensor, part.rows, part.columns, name, add_rows(part_sums, part.output_weights))
        for part, part_sums in zip(parts, by_part, strict=True)
    ]


def _check_filled(parameter: Tensor | None, name: str, rank: int) -> None:
    if parameter is not None and parameter.is_meta:
        raise CheckpointError(f"rank {rank}: the parameter {name!r} was not filled")


@dataclass(frozen=True, slots=True)
class _Part:
    """A rank's part of one piece, and the weights that its outputs and inputs have where the file keeps them.

    Of what a file has transposed the inputs are the rows, where each of the two checksums has weights of its own.
    """

    tensor: str
    rows: Span
    columns: Span
    output_weights: Tensor  # [2, outputs] int32
    input_weights: Tensor  # [1, inputs] int32, or [2, inputs]

    @classmethod
    def of(cls, piece: Piece, rank: int, place: StoredTensor) -> "_Part":
        spans, shape = piece.partition.local_spans(rank), (*piece.partition.shape, 1)
        offset, size = place.part * shape[0], place.num_parts * shape[0]
        outputs = Span(offset + spans[0].start, offset + spans[0].stop)
        inputs = spans[1] if len(spans) == 2 else Span(0, 1)
        if place.transposed:
            output_weights = _as_in_file(column_weights(size), outputs, place).expand(2, -1)
            input_weights = row_weights(shape[1])[:, inputs.start : inputs.stop]
            return cls(place.name, inputs, outputs, output_weights, input_weights)
        output_weights = _as_in_file(row_weights(size), outputs, place)
        input_weights = column_weights(shape[1])[None, inputs.start : inputs.stop]
        return cls(place.name, outputs, inputs, output_weights, input_weights)


def _as_in_file(
    weights: Tensor,  # [..., rows of the file]
    outputs: Span,
    place: StoredTensor,
) -> Tensor:  # [..., outputs]
    """Those of the model's rows `outputs`, from where the file has each of them."""
    if not place.interleaved:
        return weights[..., outputs.start : outputs.stop]
    row = torch.arange(outputs.start, outputs.stop)
    within, half = row % place.interleaved, place.interleaved // 2
    return weights[..., row - within + 2 * (within % half) + within // half]
