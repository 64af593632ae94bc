"""The checksum: that of a whole is the sum over its parts, and no change of bits or places keeps it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from model_shards.weights.checksum import add_rows, column_weights, counts_alike, row_sums, row_weights
from model_shards.weights.proof import MODULUS, Checksum, add_checksums

ROWS, COLUMNS = 37, 50


def drawn(seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed)).to(dtype)


def of(values: Tensor, row: int = 0, column: int = 0) -> Checksum:
    sums = row_sums(values, column_weights(COLUMNS)[column : column + values.shape[1]])
    return add_rows(sums, row_weights(ROWS)[:, row : row + values.shape[0]])


@given(
    st.integers(0, ROWS),
    st.integers(0, COLUMNS),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_parts_add_up_to_the_whole(row: int, column: int, dtype: torch.dtype) -> None:
    values = drawn(0, dtype)
    upper = of(values[:row, :column]), of(values[:row, column:], 0, column)
    lower = of(values[row:, :column], row), of(values[row:, column:], row, column)
    assert add_checksums((*upper, *lower)) == of(values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_sum_of_bits_times_weights(dtype: torch.dtype) -> None:
    bits = drawn(0, dtype).float().view(torch.int32).tolist()
    columns = column_weights(COLUMNS).tolist()
    expected = tuple(
        sum(bits[i][j] * rows[i] * columns[j] for i in range(ROWS) for j in range(COLUMNS)) % MODULUS
        for rows in row_weights(ROWS).tolist()
    )
    assert of(drawn(0, dtype)) == expected


def test_what_counts_alike_need_not_be_converted() -> None:
    values = drawn(0, torch.bfloat16)
    assert counts_alike(torch.bfloat16, torch.float32)
    assert of(values) == of(values.float())
    assert not counts_alike(torch.float16, torch.float32)
    assert not counts_alike(torch.float32, torch.bfloat16)


def test_weights_are_odd_and_all_different() -> None:
    all_weights = torch.cat((row_weights(2**16), column_weights(2**16)[None]))
    assert bool((all_weights % 2 != 0).all())
    assert len(set(all_weights.view(-1).tolist())) > 0.999 * all_weights.numel()
    assert torch.equal(row_weights(2**16)[:, :ROWS], row_weights(ROWS))


@given(st.integers(0, ROWS - 1), st.integers(0, COLUMNS - 1), st.integers(0, 31))
def test_any_flipped_bit_shows(row: int, column: int, bit: int) -> None:
    values = drawn(0)
    before = of(values)
    values.view(torch.int32)[row, column] ^= -(2**31) if bit == 31 else 1 << bit
    assert of(values) != before


def test_places_show_also_in_numbers_that_were_16_bits() -> None:
    """Their lower halves are zeros: the checksum has 16 bits of a row, and must have more of several."""
    values = drawn(0, torch.bfloat16).float()
    before = of(values)
    changed = [
        values.roll(1, 0),
        values.roll(1, 1),
        values.flip(0),
        values.flip(1),
        torch.cat((values[ROWS // 2 :], values[: ROWS // 2])),
        torch.zeros_like(values),
    ]
    sums = {before, *(of(each) for each in changed)}
    assert len(sums) == len(changed) + 1
    swaps = set()
    for first in range(ROWS):
        for second in range(first):
            order = list(range(ROWS))
            order[first], order[second] = second, first
            swaps.add(of(values[order]))
    assert len(swaps) == ROWS * (ROWS - 1) // 2
