"""A checksum of a matrix's bits that adds up over any parts of it: the arithmetic of the shard proof.

Each element counts as its bits, as a whole number, times an odd weight of its row and one of its column in the
file; sums are modulo 2**32. So the sum of a whole is the sum of its parts, however it was cut. A changed bit, a
part in the place of another or rows in another order change it: all but one in some 2**31 differences (Freivalds'
test of a matrix product, 1977). Integers of 32 bits, because CPUs multiply eight of them at once.

Knows bits and positions; knows nothing of files, ranks or models.
"""

from functools import cache

import torch
from torch import Tensor

MODULUS = 2**32
CHUNK_ELEMENTS = 2**18  # a megabyte of words: what is done to it stays in the cache

_ROW_SEED, _COLUMN_SEED = 0x1F123BB5, 0x5BD1E995


def checksum(
    values: Tensor,  # [rows, columns], float32 or a 16-bit type
    row_weights: Tensor,  # [rows] int32
    column_weights: Tensor,  # [columns] int32
) -> Tensor:  # [] int64, on the device of `values`, not yet reduced modulo 2**32
    """The sum over a part whose rows and columns have these weights."""
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    rows_each = max(1, CHUNK_ELEMENTS // max(1, values.shape[1]))
    for start in range(0, values.shape[0], rows_each):
        rows = _words(values[start : start + rows_each]).mul_(column_weights).sum(dim=1, dtype=torch.int32)
        total += (rows * row_weights[start : start + rows_each]).sum(dtype=torch.int64)
    return total


@cache
def row_weights(size: int) -> Tensor:  # [size] int32
    """The weights of a file tensor's first `size` rows."""
    return _odd_numbers(size, _ROW_SEED)


@cache
def column_weights(size: int) -> Tensor:  # [size] int32
    """The weights of a file tensor's first `size` columns."""
    return _odd_numbers(size, _COLUMN_SEED)


def _words(values: Tensor) -> Tensor:  # int32, a new tensor
    if values.element_size() == 2:
        return values.contiguous().view(torch.int16).to(torch.int32)
    bits = values.contiguous().view(torch.int32)
    # Numbers from 16-bit files have zeros in the lower half, where a product modulo 2**32 keeps all of its factor.
    return (bits >> 16).add_(bits)


def _odd_numbers(size: int, seed: int) -> Tensor:
    """The first `size` outputs of a 32-bit counter hash (the finaliser of MurmurHash3), made odd."""
    number = torch.arange(1, size + 1, dtype=torch.int64)
    number = (number * 0x9E3779B1 + seed) & 0xFFFFFFFF
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        number = ((number ^ (number >> shift)) * factor) & 0xFFFFFFFF
    number = (number ^ (number >> 16)) | 1
    return torch.where(number >= 2**31, number - 2**32, number).to(torch.int32)
