"""Sums over the rows of packed weights, read where they lie: for the shard proof, at the price of one pass.

Unpacking a weight costs as much as packing it, a third of a load. oneDNN packs in blocks of output rows, column
after column; a probe finds the block size, and where the layout is another there is no short way. Knows oneDNN's
layout; knows nothing of files or ranks.
"""

import ctypes
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_shards.layers.linear import Linear, pack_weight
from model_shards.weights.checksum import row_sums

_BLOCK_ROWS = (64, 48, 32, 24, 16, 8)
_PROBE_COLUMNS = 16

Words = NDArray[np.int32]


def weight_row_sums(
    linear: Linear,
    column_weights: Tensor,  # [in_features] int32
) -> Tensor:  # [out_features] int32
    """`checksum.row_sums` of the weight that `linear` multiplies with."""
    if linear.packed_weight is not None:
        block_rows = _block_rows(linear.out_features, linear.in_features)
        if block_rows is not None:
            blocks = _blocks(linear.packed_weight, linear.in_features, linear.out_features, block_rows)
            if blocks is not None:
                sums = np.einsum("bcr,c->br", blocks, column_weights.numpy())
                return torch.from_numpy(sums.reshape(-1)[: linear.out_features])
    return row_sums(linear.dense_weight(), column_weights)


@cache
def _block_rows(out_features: int, in_features: int) -> int | None:
    """How many rows a block has, found by packing numbers that say where they belong; None in another layout."""
    columns = min(in_features, _PROBE_COLUMNS + in_features % _PROBE_COLUMNS)
    places = torch.arange(out_features * columns, dtype=torch.int32).view(out_features, columns)
    packed = pack_weight(places.view(torch.float32))
    for block_rows in _BLOCK_ROWS:
        blocks = _blocks(packed, columns, out_features, block_rows)
        if blocks is not None:
            rows = blocks.transpose(0, 2, 1).reshape(-1, columns)[:out_features]
            if np.array_equal(rows, places.numpy()):
                return block_rows
    return None


def _blocks(packed: Tensor, columns: int, rows: int, block_rows: int) -> Words | None:
    """[blocks, columns, rows of a block], without the padding of columns; None where the size is another."""
    words = _memory(packed)
    num_blocks = -(-rows // block_rows)
    padded_columns, rest = divmod(words.size, num_blocks * block_rows)
    if rest or padded_columns < columns:
        return None
    return words.reshape(num_blocks, padded_columns, block_rows)[:, :columns]


def _memory(packed: Tensor) -> Words:
    """What an opaque tensor holds; valid as long as the tensor is."""
    address, size = torch.ops.mkldnn.data_ptr(packed), torch.ops.mkldnn._nbytes(packed)
    return np.frombuffer((ctypes.c_byte * size).from_address(address), dtype=np.int32)
