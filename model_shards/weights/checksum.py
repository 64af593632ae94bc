"""A checksum of a matrix's bits that adds up over any parts of it: the arithmetic of the shard proof.

Each element counts as its bits, as a whole number, times an odd weight of its column and an odd weight of its
row in the file, modulo 2**32; a number of 16 bits is the upper half of such a one, as bfloat16 is of float32.
So the sum of a whole is the sum of its parts, however it was cut; and a changed bit, a part in the place of
another or rows in another order change it (Freivalds' test of a matrix product, 1977). There are two sums, with
two weights a row: differences in several rows go unseen once in 2**62, or 2**30 for numbers of 16 bits; in one
row, once in 2**31 or 2**15, but never a single element's.

One pass over memory: integers of 32 bits, which a CPU multiplies eight at once, and `einsum`, which keeps nothing
(0.35 ns an element where a product and a sum take 0.6). Knows bits and positions; knows nothing of files or ranks.
"""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from model_shards.weights.proof import MODULUS, Checksum

_CUDA_CHUNK_ELEMENTS = 2**24
_COLUMN_SEED, *_ROW_SEEDS = 0x5BD1E995, 0x1F123BB5, 0x3C6EF372


def row_sums(
    values: Tensor,  # [rows, columns], float32 or a 16-bit type
    column_weights: Tensor,  # [columns] int32
) -> Tensor:  # [rows] int32, on the CPU
    """Each row's elements times the weights of their columns."""
    if values.device.type == "cpu":
        return _row_sums_on_cpu(values, column_weights)
    weights = column_weights.to(values.device)
    rows_each = max(1, _CUDA_CHUNK_ELEMENTS // max(1, values.shape[1]))
    sums = [(_words(part) * weights).sum(dim=1, dtype=torch.int32) for part in torch.split(values, rows_each)]
    return torch.cat(sums).cpu()


def add_rows(
    sums: Tensor,  # [rows] int32, or [2, rows] where each of the two checksums has its own
    row_weights: Tensor,  # [2, rows] int32
) -> Checksum:
    """The rows' sums times the weights of the rows."""
    first, second = np.einsum("...r,...r->...", sums.numpy(), row_weights.numpy()).tolist()
    return first % MODULUS, second % MODULUS


def counts_alike(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether numbers have the same sums in both types, so that they need not be converted."""
    return stored == wanted or (stored, wanted) == (torch.bfloat16, torch.float32)


@cache
def row_weights(size: int) -> Tensor:  # [2, size] int32
    """The weights of a file tensor's first `size` rows."""
    return torch.stack([_odd_numbers(size, seed) for seed in _ROW_SEEDS])


@cache
def column_weights(size: int) -> Tensor:  # [size] int32
    """The weights of a file tensor's first `size` columns."""
    return _odd_numbers(size, _COLUMN_SEED)


def _row_sums_on_cpu(values: Tensor, column_weights: Tensor) -> Tensor:
    if values.element_size() == 4:
        words = values.view(torch.int32).numpy()
        return torch.from_numpy(np.einsum("rc,c->r", words, column_weights.numpy()))
    # Modulo 2**16 and then shifted is shifted and then modulo 2**32, with half the work.
    halves = values.view(torch.int16).numpy()
    sums = np.einsum("rc,c->r", halves, column_weights.numpy().astype(np.int16))
    return torch.from_numpy(sums).to(torch.int32) << 16


def _words(values: Tensor) -> Tensor:  # int32
    if values.element_size() == 4:
        return values.view(torch.int32)
    return values.view(torch.int16).to(torch.int32) << 16


def _odd_numbers(size: int, seed: int) -> Tensor:
    """The first `size` outputs of a 32-bit counter hash (the finaliser of MurmurHash3), made odd."""
    number = torch.arange(1, size + 1, dtype=torch.int64)
    number = (number * 0x9E3779B1 + seed) & 0xFFFFFFFF
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        number = ((number ^ (number >> shift)) * factor) & 0xFFFFFFFF
    number = (number ^ (number >> 16)) | 1
    return torch.where(number >= 2**31, number - 2**32, number).to(torch.int32)
