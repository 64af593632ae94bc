"""The arithmetic of cuts: everything is covered, ratios hold, ranks balance, and what cannot be cut says so."""

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_shards.errors import PartitionError
from model_shards.families.decoder_layout import decoder_layout
from model_shards.partition import (
    ParameterLayout,
    Partition,
    Piece,
    Span,
    alignment_for,
    cut_balanced,
    cut_heads,
    partition_model,
)
from tests.fakes.specs import SMOLLM2


def sizes(spans: tuple[Span, ...]) -> list[int]:
    return [span.size for span in spans]


def assert_contiguous(spans: tuple[Span, ...], total: int) -> None:
    assert spans[0].start == 0
    assert spans[-1].stop == total
    assert all(left.stop == right.start for left, right in pairwise(spans))
    assert all(span.size > 0 for span in spans)


@pytest.mark.parametrize(
    ("ranks", "query", "kv"),
    [
        (1, [9], [3]),
        (2, [6, 3], [2, 1]),
        (3, [3, 3, 3], [1, 1, 1]),
        (4, [2, 1, 3, 3], [1, 1, 1, 1]),
        (9, [1] * 9, [1] * 9),
    ],
)
def test_smollm2_heads(ranks: int, query: list[int], kv: list[int]) -> None:
    query_heads, kv_heads = cut_heads(9, 3, ranks)
    assert (sizes(query_heads), sizes(kv_heads)) == (query, kv)


def test_a_shared_kv_head_is_on_every_rank_of_its_group() -> None:
    _, kv_heads = cut_heads(9, 3, 4)
    assert kv_heads == (Span(0, 1), Span(0, 1), Span(1, 2), Span(2, 3))


@given(kv=st.integers(1, 40), ratio=st.integers(1, 12), data=st.data())
def test_heads_are_covered_at_one_ratio_a_rank(kv: int, ratio: int, data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, kv * ratio))
    query_heads, kv_heads = cut_heads(kv * ratio, kv, ranks)
    assert len(query_heads) == len(kv_heads) == ranks
    assert_contiguous(query_heads, kv * ratio)
    for query, groups in zip(query_heads, kv_heads, strict=True):
        assert groups.size == 1 or query.size == ratio * groups.size
        assert groups.start * ratio <= query.start
        assert query.stop <= groups.stop * ratio
    loads = sizes(query_heads)
    assert max(loads) - min(loads) <= ratio


@given(
    total=st.integers(1, 3000),
    burdens=st.lists(st.fractions(0, 3000, max_denominator=3), min_size=1, max_size=12),
)
def test_columns_are_covered_and_level(total: int, burdens: list[Fraction]) -> None:
    if total < len(burdens):
        with pytest.raises(PartitionError, match=f"{total} columns cannot be split over {len(burdens)} ranks"):
            cut_balanced(total, burdens, "columns")
        return
    spans = cut_balanced(total, burdens, "columns")
    assert_contiguous(spans, total)
    unit = alignment_for(total, len(burdens))
    assert all(span.start % unit == 0 for span in spans)
    # No rank that was given more than the least lies more than the rounding above any other.
    loads = [span.size + burden for span, burden in zip(spans, burdens, strict=True)]
    for span, load in zip(spans, loads, strict=True):
        if span.size > 2 * unit:
            assert load <= min(loads) + 3 * unit


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
def test_smollm2_ranks_hold_nearly_equal_weights(ranks: int) -> None:
    layout = decoder_layout(SMOLLM2, partition_model(SMOLLM2, ranks))
    weights = [sum(parameter.local_size(rank) for parameter in layout.values()) for rank in range(ranks)]
    assert max(weights) < 1.05 * min(weights)


@pytest.mark.parametrize("shares", [(2, 1), (1, 2), (3, 1), (1, 1, 2), (4, 2, 1, 1), (1, 3, 1, 3)])
def test_unequal_ranks_hold_weights_as_they_were_told(shares: tuple[int, ...]) -> None:
    layout = decoder_layout(SMOLLM2, partition_model(SMOLLM2, len(shares), shares))
    weights = [sum(parameter.local_size(rank) for parameter in layout.values()) for rank in range(len(shares))]
    for weight, share in zip(weights, shares, strict=True):
        assert weight / sum(weights) == pytest.approx(share / sum(shares), rel=0.06)


@pytest.mark.parametrize(
    ("query_heads", "kv_heads", "shares", "query", "kv"),
    [
        (9, 3, (2, 1), [6, 3], [2, 1]),
        (9, 3, (1, 2), [3, 6], [1, 2]),
        (8, 8, (5, 3), [5, 3], [5, 3]),
        (8, 2, (100, 1), [4, 4], [1, 1]),  # a rank has at least one group, or a part of one
        (6, 1, (2, 1), [4, 2], [1, 1]),
        (8, 2, (3, 1, 1, 1), [3, 1, 2, 2], [1, 1, 1, 1]),
    ],
)
def test_heads_go_by_shares(
    query_heads: int, kv_heads: int, shares: tuple[int, ...], query: list[int], kv: list[int]
) -> None:
    cut = cut_heads(query_heads, kv_heads, len(shares), shares)
    assert (sizes(cut[0]), sizes(cut[1])) == (query, kv)


@given(kv=st.integers(1, 12), ratio=st.integers(1, 8), data=st.data())
def test_heads_by_shares_are_covered_at_one_ratio_a_rank(kv: int, ratio: int, data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, kv * ratio))
    shares = data.draw(st.lists(st.integers(1, 1000), min_size=ranks, max_size=ranks))
    query_heads, kv_heads = cut_heads(kv * ratio, kv, ranks, shares)
    assert_contiguous(query_heads, kv * ratio)
    for query, groups in zip(query_heads, kv_heads, strict=True):
        assert groups.size == 1 or query.size == ratio * groups.size
        assert groups.start * ratio <= query.start
        assert query.stop <= groups.stop * ratio


@pytest.mark.parametrize("shares", [(2,), (2, 0), (1, 1, 1)])
def test_shares_that_fit_no_ranks_are_refused(shares: tuple[int, ...]) -> None:
    with pytest.raises(PartitionError, match=r"are not 2 positive numbers, one a rank"):
        partition_model(SMOLLM2, 2, shares)


def test_an_odd_vocabulary_is_cut_in_rank_order() -> None:
    assert cut_balanced(1003, [Fraction(0)] * 2, "ids") == (Span(0, 496), Span(496, 1003))


@pytest.mark.parametrize("ranks", [0, 10])
def test_ranks_without_a_query_head_are_refused(ranks: int) -> None:
    with pytest.raises(PartitionError, match=f"9 query heads cannot be split over {ranks} ranks"):
        cut_heads(9, 3, ranks)


def test_local_shapes_follow_the_cut() -> None:
    rows = Partition((10, 4), 2, 0, (Span(0, 6), Span(6, 10)))
    columns = Partition((4, 10), 2, 1, (Span(0, 6), Span(6, 10)))
    whole = Partition((7,), 2)
    assert [rows.local_shape(rank) for rank in (0, 1)] == [(6, 4), (4, 4)]
    assert columns.local_spans(1) == (Span(0, 4), Span(6, 10))
    assert whole.local_shape(1) == (7,)
    stacked = ParameterLayout((Piece("a", rows), Piece("b", rows)))
    assert stacked.local_shape(0) == (12, 4)
    assert stacked.local_size(1) == 32
