"""A spec refuses the numbers that no layer could be built from."""

import dataclasses

import pytest

from model_shards.errors import UnsupportedModel
from tests.fakes.specs import SMOLLM2


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


def test_windows_belong_to_layers() -> None:
    assert SMOLLM2.window_of(3) is None
    windows = (128, *[None] * (SMOLLM2.num_layers - 1))
    spec = dataclasses.replace(SMOLLM2, windows=windows)
    assert (spec.window_of(0), spec.window_of(1)) == (128, None)
    with pytest.raises(UnsupportedModel, match="29 attention windows for 30 layers"):
        dataclasses.replace(SMOLLM2, windows=windows[1:])
