"""A Triton kernel for decodes: one new token a sequence attends over KV blocks that lie anywhere in the cache.

The query heads of a KV group share what is read: a program takes one group of one sequence and walks over the keys
with a running softmax. Few sequences would leave most of a GPU idle, so their keys are cut into parts, one program
each, which a second kernel joins by their log-sum-exps (the rule of flash decoding). The grid follows from shapes
alone, so a launch can be captured in a graph; programs without keys end at once.

Tests run it under Triton's interpreter and compile it for GPUs. Knows tensors; knows nothing of sequences.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 64  # keys at a time
_LEAST_ROWS = 16  # of a matrix product on tensor cores
_MOST_PARTS = 16
_STAGES = 2  # tiles in flight: with heads of 256 more would not fit into the shared memory of a multiprocessor
_PROGRAMS_PER_MULTIPROCESSOR = 2


class PagedDecode:
    """A `DecodeKernel`. `multiprocessors` says how many programs keep the device busy."""

    def __init__(self, multiprocessors: int) -> None:
        self._wanted = multiprocessors * _PROGRAMS_PER_MULTIPROCESSOR

    def __call__(
        self,
        query: Tensor,  # [rows, query heads, head_dim]
        pages: Tensor,  # [2, KV heads, blocks, block_size, head_dim], keys first
        block_tables: Tensor,  # [rows, blocks of a row] int32
        contexts: Tensor,  # [rows] int32, at least 1
        window: int | None,
    ) -> Tensor:  # [rows, query heads, head_dim]
        rows, num_heads, head_dim = query.shape
        _, kv_heads, num_blocks, block_size, _ = pages.shape
        longest = block_tables.shape[1] * block_size
        parts = num_parts(rows * kv_heads, longest, self._wanted)
        group = num_heads // kv_heads
        found = query.new_empty((rows, num_heads, parts, head_dim), dtype=torch.float32)
        weights = query.new_empty((rows, num_heads, parts), dtype=torch.float32)
        _attend_part[(rows, kv_heads, parts)](
            query,
            pages,
            block_tables,
            contexts,
            found,
            weights,
            query.stride(0),
            query.stride(1),
            block_tables.stride(0),
            num_blocks * block_size * head_dim,
            head_dim**-0.5,
            longest if window is None else window,
            KV_HEADS=kv_heads,
            GROUP=group,
            HEAD_DIM=head_dim,
            BLOCK_SIZE=block_size,
            PARTS=parts,
            TILE=_TILE,
            ROWS=max(_LEAST_ROWS, triton.next_power_of_2(group)),
            WIDTH=max(_LEAST_ROWS, triton.next_power_of_2(head_dim)),
            num_stages=_STAGES,
        )
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        _join_parts[(rows, num_heads)](
            found,
            weights,
            out,
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            PARTS=parts,
            WIDTH=triton.next_power_of_2(head_dim),
            SLOTS=triton.next_power_of_2(parts),
        )
        return out


def num_parts(programs: int, longest_context: int, wanted: int) -> int:
    """Into how many parts each row's keys are cut, so that about `wanted` programs have something to do."""
    tiles = -(-longest_context // _TILE)
    return max(1, min(wanted // programs, tiles, _MOST_PARTS))


@triton.jit  # type: ignore[untyped-decorator]
def _attend_part(
    query: tl.tensor,
    pages: tl.tensor,
    block_tables: tl.tensor,
    contexts: tl.tensor,
    found: tl.tensor,  # [rows, query heads, PARTS, HEAD_DIM] float32: the result over each part alone
    weights: tl.tensor,  # [rows, query heads, PARTS] float32: the log-sum-exp of the part's scores
    query_row: tl.tensor,  # strides, in elements
    query_head: tl.tensor,
    table_row: tl.tensor,
    page_head: tl.tensor,
    scale: tl.tensor,
    window: tl.tensor,
    KV_HEADS: tl.constexpr,  # noqa: N803  # Triton's constants are written like this
    GROUP: tl.constexpr,  # noqa: N803
    HEAD_DIM: tl.constexpr,  # noqa: N803
    BLOCK_SIZE: tl.constexpr,  # noqa: N803
    PARTS: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
) -> None:
    row = tl.program_id(0)
    head = tl.program_id(1)
    part = tl.program_id(2)
    context = tl.load(contexts + row)
    begin = tl.maximum(context - window, 0)
    tiles_a_part = tl.cdiv(tl.cdiv(context - begin, TILE), PARTS)
    first = begin + part * tiles_a_part * TILE
    stop = tl.minimum(context, first + tiles_a_part * TILE)

    in_group = tl.arange(0, ROWS)
    dims = tl.arange(0, WIDTH)
    is_query = (in_group < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    heads = head * GROUP + in_group
    queries = tl.load(
        query + row.to(tl.int64) * query_row + heads[:, None] * query_head + dims[None, :],
        mask=is_query,
        other=0.0,
    )
    keys_of_head = pages + head.to(tl.int64) * page_head
    values_of_head = pages + (head + KV_HEADS).to(tl.int64) * page_head

    greatest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(first, stop, TILE):
        place = start + tl.arange(0, TILE)
        is_key = place < stop
        block = tl.load(block_tables + row.to(tl.int64) * table_row + place // BLOCK_SIZE, mask=is_key, other=0)
        token = block.to(tl.int64) * BLOCK_SIZE + place % BLOCK_SIZE
        address = token[:, None] * HEAD_DIM + dims[None, :]
        is_there = is_key[:, None] & (dims < HEAD_DIM)[None, :]
        keys = tl.load(keys_of_head + address, mask=is_there, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where(is_key[None, :], scores, float("-inf"))
        higher = tl.maximum(greatest, tl.max(scores, 1))
        factor = tl.exp(greatest - higher)
        shares = tl.exp(scores - higher[:, None])
        values = tl.load(values_of_head + address, mask=is_there, other=0.0)
        result = result * factor[:, None] + tl.dot(shares.to(values.dtype), values, input_precision="ieee")
        total = total * factor + tl.sum(shares, 1)
        greatest = higher

    # A part without keys has a total of 0 and a weight of minus infinity: it counts for nothing when parts join.
    place_of_part = (row.to(tl.int64) * KV_HEADS * GROUP + heads) * PARTS + part
    tl.store(weights + place_of_part, greatest + tl.log(total), mask=in_group < GROUP)
    normal = result / tl.maximum(total, 1e-30)[:, None]
    tl.store(found + place_of_part[:, None] * HEAD_DIM + dims[None, :], normal, mask=is_query)


@triton.jit  # type: ignore[untyped-decorator]
def _join_parts(
    found: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,  # [rows, query heads, HEAD_DIM]
    NUM_HEADS: tl.constexpr,  # noqa: N803
    HEAD_DIM: tl.constexpr,  # noqa: N803
    PARTS: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
    SLOTS: tl.constexpr,  # noqa: N803
) -> None:
    place = tl.program_id(0).to(tl.int64) * NUM_HEADS + tl.program_id(1)
    parts = tl.arange(0, SLOTS)
    dims = tl.arange(0, WIDTH)
    weight = tl.load(weights + place * PARTS + parts, mask=parts < PARTS, other=float("-inf"))
    share = tl.exp(weight - tl.max(weight, 0))
    share = share / tl.sum(share, 0)
    is_there = (parts < PARTS)[:, None] & (dims < HEAD_DIM)[None, :]
    results = tl.load(
        found + (place * PARTS + parts)[:, None] * HEAD_DIM + dims[None, :], mask=is_there, other=0.0
    )
    joined = tl.sum(results * share[:, None], 0)
    tl.store(out + place * HEAD_DIM + dims, joined.to(out.dtype.element_ty), mask=dims < HEAD_DIM)
