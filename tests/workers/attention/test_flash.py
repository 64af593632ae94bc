"""FlashAttention's two forms with the formula in the kernels' place: every token against dense attention."""

from typing import Any

import pytest
from torch import Tensor

from tests.workers.attention.steps import Shape, attend, check_steps, count_blocks, make_cache, make_streams
from workers.attention.flash import GatheredFlash, PagedFlash, Varlen
from workers.attention.reference import ReferenceAttention, attend_by_formula, varlen_by_formula
from workers.attention.select import DeviceAttention
from workers.errors import WorkerError

LENGTHS = (1, 5, 16, 40, 67)
# Whole prompts, chunks of them, decodes, and all of it together; every stream is computed to its end.
STEPS = (
    ((1, (0, 4)), (2, (0, 16))),
    ((0, (0, 1)), (3, (0, 30)), (4, (0, 20))),
    ((1, (4, 5)), (4, (20, 66))),
    ((4, (66, 67)), (3, (30, 40))),
)


def varlen_of_2_11(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """A signature without tables and without `enable_gqa`, whose kernel takes fewer KV heads all the same."""
    return varlen_by_formula(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, window_size=window_size, enable_gqa=True
    )


def make(form: str, shape: Shape, block_size: int) -> DeviceAttention:
    cache = make_cache(shape, count_blocks(LENGTHS, block_size), block_size)
    match form:
        case "paged":
            return PagedFlash(cache, Varlen(varlen_by_formula))
        case "gathered":
            return GatheredFlash(cache, Varlen(varlen_by_formula), attend_by_formula)
        case "gathered, torch 2.11":
            return GatheredFlash(cache, Varlen(varlen_of_2_11), attend_by_formula)
    return ReferenceAttention(cache)


@pytest.mark.parametrize("form", ["paged", "gathered", "gathered, torch 2.11", "reference"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (4, 4), (8, 1)])
@pytest.mark.parametrize("window", [None, 1, 7, 64])
def test_equals_dense_attention(form: str, heads: int, kv_heads: int, window: int | None) -> None:
    shape = Shape(heads, kv_heads, head_dim=16)
    streams = make_streams(shape, LENGTHS, 8, window)
    check_steps(make(form, shape, 8), 8, streams, STEPS, window)


def test_fresh_prompts_are_not_read_back_from_the_cache() -> None:
    shape = Shape(4, 2, head_dim=8)
    attention = GatheredFlash(make_cache(shape, 4, 8), Varlen(varlen_by_formula), attend_by_formula)
    attention.cache.tokens = _fail  # type: ignore[method-assign, assignment]
    check_steps(attention, 8, make_streams(shape, (9, 12), 8), [[(0, (0, 9)), (1, (0, 12))]])


def _fail(*_: Any) -> Any:
    raise AssertionError("the keys of a fresh prompt are at hand")


def test_flash_attention_3_takes_no_summed_lengths_beside_a_table() -> None:
    given: dict[str, Any] = {}

    def recording(*arguments: Any, window_size: Any, enable_gqa: Any, seqused_k: Any, block_table: Any) -> Any:
        given.update(key_starts=arguments[4], seqused_k=seqused_k, block_table=block_table, window=window_size)
        return arguments[0]

    shape = Shape(4, 2, head_dim=8)
    for version, expected in ((2, [0, 3]), (3, None)):
        attention = PagedFlash(make_cache(shape, 1, 8), Varlen(recording, version))
        attend(attention, 8, make_streams(shape, (3,), 8), [(0, 3)])
        found = given["key_starts"]
        assert (None if found is None else found.tolist()) == expected
        assert (given["seqused_k"].tolist(), given["block_table"].tolist(), given["window"]) == (
            [3],
            [[0]],
            (-1, 0),
        )


def test_why_blocks_cannot_be_read_in_place_is_said() -> None:
    paged = Varlen(varlen_by_formula)
    assert paged.pages_refusal(512) is None
    assert "multiple of 256 tokens, block_size is 16" in str(paged.pages_refusal(16))
    assert Varlen(varlen_by_formula, flash_version=3).pages_refusal(16) is None
    assert "takes no block tables" in str(Varlen(varlen_of_2_11).pages_refusal(256))


def test_a_torch_without_windows_is_refused() -> None:
    def before(query: Tensor, is_causal: bool = False) -> Tensor:
        return query

    with pytest.raises(WorkerError, match=r"no window_size: torch 2\.11 or newer"):
        Varlen(before)


def test_the_installed_torch_has_what_the_forms_need() -> None:
    varlen = Varlen.of_torch()
    assert varlen.pages_refusal(256) is None or "block tables" in str(varlen.pages_refusal(256))
