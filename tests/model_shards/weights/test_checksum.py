"""The checksum: that of a whole is the sum over its parts, and no change of bits or places keeps it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from model_shards.weights import checksum as checksum_module
from model_shards.weights.checksum import MODULUS, checksum, column_weights, row_weights

ROWS, COLUMNS = 37, 50


def drawn(seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed)).to(dtype)


def of(values: Tensor, row: int = 0, column: int = 0) -> int:
    rows = row_weights(ROWS)[row : row + values.shape[0]]
    columns = column_weights(COLUMNS)[column : column + values.shape[1]]
    return int(checksum(values, rows, columns).item()) % MODULUS


@settings(deadline=None)
@given(
    st.integers(0, ROWS),
    st.integers(0, COLUMNS),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_parts_add_up_to_the_whole(row: int, column: int, dtype: torch.dtype) -> None:
    values = drawn(0, dtype)
    parts = of(values[:row, :column]) + of(values[row:, :column], row)
    parts += of(values[:row, column:], 0, column) + of(values[row:, column:], row, column)
    assert parts % MODULUS == of(values)


@pytest.mark.parametrize("elements", [1, 49, 120, 10_000])
def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch, elements: int) -> None:
    whole = of(drawn(0))
    monkeypatch.setattr(checksum_module, "CHUNK_ELEMENTS", elements)
    assert of(drawn(0)) == whole


def test_it_is_the_sum_of_bits_times_weights() -> None:
    values = drawn(0, torch.bfloat16)
    bits = values.view(torch.int16).tolist()
    rows, columns = row_weights(ROWS).tolist(), column_weights(COLUMNS).tolist()
    total = sum(bits[i][j] * rows[i] * columns[j] for i in range(ROWS) for j in range(COLUMNS))
    assert of(values) == total % MODULUS


def test_weights_are_odd_and_all_different() -> None:
    for weights in (row_weights(2**17), column_weights(2**17)):
        assert bool((weights % 2 != 0).all())
        assert len(set(weights.tolist())) > 0.999 * len(weights)
    assert torch.equal(row_weights(2**17)[:ROWS], row_weights(ROWS))
    assert not torch.equal(row_weights(ROWS), column_weights(ROWS))


@given(st.integers(0, ROWS - 1), st.integers(0, COLUMNS - 1), st.integers(0, 31))
@settings(deadline=None)
def test_any_flipped_bit_shows(row: int, column: int, bit: int) -> None:
    values = drawn(0)
    before = of(values)
    values.view(torch.int32)[row, column] ^= -(2**31) if bit == 31 else 1 << bit
    assert of(values) != before


def test_places_show_also_in_numbers_that_were_16_bits() -> None:
    """Their lower halves are zeros, which a product modulo 2**32 would never mix with the upper ones."""
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
