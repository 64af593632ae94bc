"""The declared layout names exactly what the module has, and its pieces cover each tensor of the file."""

import dataclasses
from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model_shards.families.decoder import Decoder
from model_shards.families.decoder_layout import decoder_layout
from model_shards.layers.placement import Placement
from model_shards.partition import Partition, partition_model
from tests.fakes.specs import tiny_spec
from tests.fakes.thread_group import ThreadGroup

EVERYTHING = tiny_spec(
    vocab_size=1003,
    hidden_size=96,
    num_layers=2,
    head_dim=16,
    intermediate_size=160,
    qkv_bias=True,
    output_bias=True,
    mlp_bias=True,
    query_key_norm=True,
)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("extras", [False, True])
def test_layout_and_module_agree_on_every_parameter(ranks: int, tied: bool, extras: bool) -> None:
    spec = dataclasses.replace(
        EVERYTHING,
        tied_embeddings=tied,
        qkv_bias=extras,
        output_bias=extras,
        mlp_bias=extras,
        query_key_norm=extras,
    )
    for group in ThreadGroup.of(ranks):
        model = Decoder(spec, Placement(group, torch.device("cpu"), torch.float32))
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        assert shapes == {name: layout.local_shape(group.rank) for name, layout in model.layout.items()}


@settings(max_examples=60)
@given(
    kv=st.integers(1, 6),
    ratio=st.integers(1, 5),
    intermediate=st.integers(30, 700),
    vocabulary=st.integers(30, 2000),
    data=st.data(),
)
def test_every_tensor_is_covered(
    kv: int, ratio: int, intermediate: int, vocabulary: int, data: st.DataObject
) -> None:
    ranks = data.draw(st.integers(1, kv * ratio))
    spec = dataclasses.replace(
        EVERYTHING,
        num_layers=1,
        num_kv_heads=kv,
        num_query_heads=kv * ratio,
        intermediate_size=intermediate,
        vocab_size=vocabulary,
    )
    for layout in decoder_layout(spec, partition_model(spec, ranks)).values():
        for piece in layout.pieces:
            shared = piece.tensor.split(".")[-2] in ("key", "value")
            assert_covered(piece.partition, ranks, may_repeat=shared)


def assert_covered(partition: Partition, ranks: int, *, may_repeat: bool) -> None:
    """Each index of the cut axis is on exactly one rank, or on at least one where sharing is declared."""
    if partition.axis is None:
        assert all(partition.local_shape(rank) == partition.shape for rank in range(ranks))
        return
    holders: dict[int, int] = defaultdict(int)
    for rank in range(ranks):
        span = partition.local_spans(rank)[partition.axis]
        for index in range(span.start, span.stop):
            holders[index] += 1
    assert sorted(holders) == list(range(partition.shape[partition.axis]))
    if not may_repeat:
        assert set(holders.values()) == {1}
