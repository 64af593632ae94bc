"""What one rank really has in memory, mapped back to the tensors of the files: its side of the shard proof.

Reads the parameters that the model multiplies with, packed ones unpacked, after everything that loading does to
them. Where a row of the model lies in a file is worked out here by index, not by undoing what the readers do.
Knows models, layouts and places; reads no weight files.
"""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import torch
from torch import Tensor

from model_shards.errors import CheckpointError
from model_shards.layers.linear import Linear
from model_shards.partition import ParameterLayout, Piece, Span
from model_shards.registry import Model
from model_shards.weights.checkpoint import Checkpoint
from model_shards.weights.checksum import MODULUS, checksum, column_weights, row_weights
from model_shards.weights.loader import open_checkpoint
from model_shards.weights.names import StoredTensor
from model_shards.weights.proof import Holding

_WHOLE_ROW = Span(0, 1)


def holdings_of(model: Model, path: Path, rank: int) -> tuple[Holding, ...]:
    """Every part of a file tensor in the memory of `rank`, with its checksum.

    `path` is where the model was loaded from. Needs memory for one tensor. Raises `CheckpointError` naming a
    parameter that was never filled.
    """
    _, checkpoint = open_checkpoint(path)
    with closing(checkpoint):
        return tuple(
            holding
            for name, layout in _parameters(model)
            for holding in _holdings_in(model, name, layout, rank, checkpoint)
        )


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
    if isinstance(module, Linear) and leaf == "weight":
        parameter = module.dense_weight()
    else:
        parameter = module.get_parameter(leaf).detach()
    if parameter.is_meta:
        raise CheckpointError(f"rank {rank}: the parameter {name!r} was not filled")
    sizes = [piece.partition.local_shape(rank)[0] for piece in layout.pieces]
    return [
        _holding(name, piece, rank, values, checkpoint.place_of(piece.tensor))
        for piece, values in zip(layout.pieces, parameter.split(sizes), strict=True)
    ]


def _holding(parameter: str, piece: Piece, rank: int, values: Tensor, place: StoredTensor) -> Holding:
    spans, shape = piece.partition.local_spans(rank), piece.partition.shape
    size, offset = place.num_parts * shape[0], place.part * shape[0]
    outputs = Span(offset + spans[0].start, offset + spans[0].stop)
    if values.ndim == 1:
        values, rows, columns = values.unsqueeze(0), _WHOLE_ROW, outputs
        weights = row_weights(1), _at_rows_of(place, column_weights(size), outputs)
    elif place.transposed:
        rows, columns = spans[1], outputs
        weights = _at_rows_of(place, column_weights(size), outputs), _at(row_weights(shape[1]), rows)
    else:
        rows, columns = outputs, spans[1]
        weights = _at_rows_of(place, row_weights(size), outputs), _at(column_weights(shape[1]), columns)
    total = checksum(values, *(each.to(values.device) for each in weights))
    return Holding(place.name, rows, columns, parameter, int(total.item()) % MODULUS)


def _at(weights: Tensor, span: Span) -> Tensor:
    return weights[span.start : span.stop]


def _at_rows_of(place: StoredTensor, weights: Tensor, outputs: Span) -> Tensor:
    """The weights of the model's rows `outputs`, each taken from where the file has that row."""
    if not place.interleaved:
        return _at(weights, outputs)
    row = torch.arange(outputs.start, outputs.stop)
    within, half = row % place.interleaved, place.interleaved // 2
    return weights[row - within + 2 * (within % half) + within // half]
