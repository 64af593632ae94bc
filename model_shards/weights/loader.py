"""Fills one rank's shard of a model from its files, each parameter exactly once, reading only what the rank holds.

Peak memory is less than the shard and one tensor: a parameter is there twice while it is packed, and the largest
come first, when little is beside them. Knows layouts and checkpoints; of file formats only which there are.
"""

from collections.abc import Callable, Iterator
from contextlib import closing
from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn

from model_shards.errors import CheckpointError
from model_shards.group import TensorParallelGroup
from model_shards.layers.linear import Linear
from model_shards.layers.placement import Placement
from model_shards.partition import ParameterLayout, Span
from model_shards.registry import Model, build_model
from model_shards.spec import ModelSpec
from model_shards.weights.checkpoint import Checkpoint
from model_shards.weights.gguf import GgufCheckpoint
from model_shards.weights.gguf_header import GgufHeader
from model_shards.weights.metadata import folder_spec, gguf_spec
from model_shards.weights.safetensors_files import SafetensorsCheckpoint

_ELEMENTS_AT_ONCE = 2**20  # read and decoded in one piece, which stays in the cache and out of the peak

Progress = Callable[[int, int], None]  # (bytes of weights in memory, bytes there will be)


def load_model(
    path: Path,
    group: TensorParallelGroup,
    *,
    device: torch.device,
    dtype: torch.dtype,
    batch_invariant: bool = True,
    shard_weights: tuple[int, ...] = (),
    on_progress: Progress | None = None,
) -> Model:
    """The shard of `group.rank`, filled and ready to run.

    Raises `UnsupportedModel`, `PartitionError`, or `CheckpointError` naming the file and the tensor.
    """
    spec, checkpoint = open_checkpoint(path)
    with closing(checkpoint):
        model = build_model(spec, Placement(group, device, dtype, batch_invariant, shard_weights))
        fill(model, checkpoint, rank=group.rank, device=device, dtype=dtype, on_progress=on_progress)
    model.prepare()
    return model


def open_checkpoint(path: Path) -> tuple[ModelSpec, Checkpoint]:
    """What a folder or a GGUF file says it holds, and the way to its weights."""
    if path.is_dir():
        spec = folder_spec(path)
        return spec, SafetensorsCheckpoint(path, spec.architecture)
    header = GgufHeader(path)
    spec = gguf_spec(header)
    return spec, GgufCheckpoint(header, spec.head_dim)


def fill(
    model: Model,
    checkpoint: Checkpoint,
    *,
    rank: int,
    device: torch.device,
    dtype: torch.dtype,
    on_progress: Progress | None = None,
) -> None:
    """Give every parameter its memory and its values. Raises `CheckpointError` if one is left without."""
    layout = model.layout
    unnamed = {name for name, _ in model.named_parameters()} - layout.keys()
    if unnamed:
        raise CheckpointError(f"rank {rank}: nothing fills the parameters {sorted(unnamed)}")
    checkpoint.check([piece.tensor for parameter in layout.values() for piece in parameter.pieces])
    total = sum(parameter.local_size(rank) for parameter in layout.values()) * dtype.itemsize
    done = 0
    for name, parameter in sorted(layout.items(), key=lambda each: -each[1].local_size(rank)):
        filled = _read_parameter(checkpoint, parameter, rank, device, dtype)
        module = _set_parameter(model, name, filled)
        # At once, not at the end: the next tensor reuses the memory of the plain copy (first touch is what costs).
        if isinstance(module, Linear) and not any(left.is_meta for left in module.parameters()):
            module.prepare()
        done += filled.numel() * dtype.itemsize
        if on_progress is not None:
            on_progress(done, total)


def _read_parameter(
    checkpoint: Checkpoint, layout: ParameterLayout, rank: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    parameter = torch.empty(layout.local_shape(rank), dtype=dtype, device=device)
    row = 0
    for piece in layout.pieces:
        shape = checkpoint.shape_of(piece.tensor)
        if shape != piece.partition.shape:
            raise CheckpointError(
                f"{checkpoint.file_of(piece.tensor)}: tensor {piece.tensor!r} has shape {list(shape)}, "
                f"but the config says {list(piece.partition.shape)}"
            )
        rows, *others = piece.partition.local_spans(rank)
        for some in _in_steps(rows, *others, multiple_of=checkpoint.place_of(piece.tensor).interleaved or 1):
            parameter[row : row + some.size].copy_(checkpoint.read(piece.tensor, (some, *others)))
            row += some.size
    assert row == parameter.shape[0], "the pieces of a parameter fill all its rows"
    return parameter


def _in_steps(rows: Span, *others: Span, multiple_of: int) -> Iterator[Span]:
    """`rows` in pieces of few enough elements, cut at multiples of a number from their start."""
    fitting = _ELEMENTS_AT_ONCE // prod(span.size for span in others)
    step = max(1, fitting // multiple_of) * multiple_of
    for start in range(rows.start, rows.stop, step):
        yield Span(start, min(start + step, rows.stop))


def _set_parameter(model: nn.Module, name: str, filled: Tensor) -> nn.Module:
    """Put `filled` in the place of the empty parameter `name`, once, and return the module it belongs to."""
    path, leaf = name.rsplit(".", 1)
    module = model.get_submodule(path)
    empty = module.get_parameter(leaf)
    assert empty.is_meta, f"{name} is filled twice"
    assert empty.shape == filled.shape, f"{name}: the module has {empty.shape}, the layout {filled.shape}"
    module.register_parameter(leaf, nn.Parameter(filled, requires_grad=False))
    return module
