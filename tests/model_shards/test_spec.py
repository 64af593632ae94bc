"""A spec refuses the numbers that no layer could be built from."""

import dataclasses

import pytest

from model_shards.errors import UnsupportedModel
from tests.model_shards.test_partition import SMOLLM2


def test_query_heads_must_divide_over_kv_heads() -> None:
    with pytest.raises(UnsupportedModel, match="9 query heads do not divide over 2 KV heads"):
        dataclasses.replace(SMOLLM2, num_kv_heads=2)


def test_an_odd_head_size_cannot_be_rotated() -> None:
    with pytest.raises(UnsupportedModel, match="head_dim is 63"):
        dataclasses.replace(SMOLLM2, head_dim=63)


@pytest.mark.parametrize("name", ["vocab_size", "num_layers", "num_kv_heads", "max_positions"])
def test_sizes_are_positive(name: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"{name} is 0"):
        dataclasses.replace(SMOLLM2, **{name: 0})
