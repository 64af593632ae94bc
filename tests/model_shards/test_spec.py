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


def test_sizes_are_positive() -> None:
    with pytest.raises(UnsupportedModel, match="num_layers is 0"):
        dataclasses.replace(SMOLLM2, num_layers=0)
    with pytest.raises(UnsupportedModel, match="num_kv_heads is -1"):
        dataclasses.replace(SMOLLM2, num_kv_heads=-1)
