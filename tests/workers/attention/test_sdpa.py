"""Paged attention against dense attention, for every shape of head group, block size and chunking."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.fakes.plain_attention import PlainAttention
from workers.attention.metadata import AttentionMetadata, QueryRange
from workers.attention.sdpa import PagedAttention
from workers.attention.select import select_attention
from workers.errors import WorkerError
from workers.kv_cache import KvCache


@dataclass
class Shape:
    num_local_query_heads: int
    num_local_kv_heads: int
    head_dim: int
    num_layers: int = 2


class Stream:
    """One sequence's queries, keys and values, and what dense attention makes of them."""

    def __init__(self, shape: Shape, num_tokens: int, blocks: Sequence[int], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def drawn(heads: int) -> Tensor:
            return torch.randn(num_tokens, heads, shape.head_dim, generator=generator)

        self.query, self.key, self.value = map(
            drawn, (shape.num_local_query_heads, shape.num_local_kv_heads, shape.num_local_kv_heads)
        )
        self.blocks = list(blocks)
        self.expected = PlainAttention().attend(0, self.query, self.key, self.value)


def attend(
    attention: PagedAttention, streams: Sequence[Stream], spans: Sequence[tuple[int, int]], layer: int = 1
) -> list[Tensor]:
    """One step that computes tokens [start, end) of each stream; decodes first, as the packer orders them."""
    size = attention.cache.block_size
    order = sorted(range(len(spans)), key=lambda i: (spans[i][1] - spans[i][0] > 1, -spans[i][1]))
    width = max(-(-spans[i][1] // size) for i in order)
    tables = np.array([(streams[i].blocks + [streams[i].blocks[0]] * width)[:width] for i in order])
    slots, queries, first = [], [], 0
    for i in order:
        start, end = spans[i]
        slots += [streams[i].blocks[place // size] * size + place % size for place in range(start, end)]
        queries.append(QueryRange(first, end - start, end))
        first += end - start
    num_decodes = sum(query.count == 1 for query in queries)
    context = attention.prepare(AttentionMetadata(torch.tensor(slots), tuple(queries), num_decodes, tables))

    def packed(name: str) -> Tensor:
        return torch.cat([getattr(streams[i], name)[slice(*spans[i])] for i in order])

    out = context.attend(layer, packed("query"), packed("key"), packed("value"))
    parts = dict(zip(order, torch.split(out, [query.count for query in queries]), strict=True))
    return [parts[i] for i in range(len(spans))]


def make_attention(shape: Shape, num_blocks: int, block_size: int) -> PagedAttention:
    cache = KvCache(shape, num_blocks=num_blocks, block_size=block_size, dtype="float32", device="cpu")
    return PagedAttention(cache, shape.num_local_query_heads)


@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (6, 2), (3, 1), (2, 1), (1, 1), (4, 4), (8, 1), (10, 2)])
@pytest.mark.parametrize("block_size", [16, 24, 300])
def test_equals_dense_attention(heads: int, kv_heads: int, block_size: int) -> None:
    shape = Shape(heads, kv_heads, head_dim=16)
    lengths = [1, 7, 255, 256, 257, 513, 600]
    blocks = torch.randperm(200, generator=torch.Generator().manual_seed(0)).tolist()
    streams = [
        Stream(shape, length, [blocks.pop() for _ in range(-(-length // block_size))], seed)
        for seed, length in enumerate(lengths)
    ]
    attention = make_attention(shape, 200, block_size)
    found: list[list[Tensor]] = [[] for _ in streams]
    done = [0] * len(streams)
    source = torch.Generator().manual_seed(1)
    while any(place < length for place, length in zip(done, lengths, strict=True)):
        step = [i for i, length in enumerate(lengths) if done[i] < length]
        sizes = [int(torch.randint(1, 300, (), generator=source)) for _ in step]
        # The last token of a stream is a decode, whatever came before.
        ends = [max(done[i] + 1, min(done[i] + size, lengths[i] - 1)) for i, size in zip(step, sizes, strict=True)]
        spans = [(done[i], end) for i, end in zip(step, ends, strict=True)]
        for i, part in zip(step, attend(attention, [streams[i] for i in step], spans), strict=True):
            found[i].append(part)
        for i, (_, end) in zip(step, spans, strict=True):
            done[i] = end
    for stream, parts in zip(streams, found, strict=True):
        torch.testing.assert_close(torch.cat(parts), stream.expected, rtol=1e-5, atol=1e-5)


def test_more_decodes_than_one_call_holds() -> None:
    shape = Shape(9, 3, head_dim=64)
    attention = make_attention(shape, 64, 16)
    count = 3 * attention.decodes_per_call + 1
    streams = [Stream(shape, 1 + number % 3, [number], number) for number in range(count)]
    for place in range(3):
        here = [number for number in range(count) if len(streams[number].key) > place]
        parts = attend(attention, [streams[number] for number in here], [(place, place + 1)] * len(here))
        for number, part in zip(here, parts, strict=True):
            torch.testing.assert_close(part[0], streams[number].expected[place], rtol=1e-5, atol=1e-5)


def test_what_a_block_held_before_does_not_show() -> None:
    shape = Shape(4, 2, head_dim=16)
    stream = Stream(shape, 21, [1, 0], seed=0)
    fresh, used = make_attention(shape, 2, 16), make_attention(shape, 2, 16)
    for layer in used.cache.layers:
        layer.normal_(std=100)
    for attention in (fresh, used):
        attend(attention, [stream], [(0, 20)])
    (expected,), (found,) = (attend(attention, [stream], [(20, 21)]) for attention in (fresh, used))
    assert torch.equal(found, expected)


def test_no_kernel_for_a_device_is_said() -> None:
    shape = Shape(4, 2, head_dim=16)
    attention = make_attention(shape, 2, 16)
    attention.cache.layers = [layer.to("meta") for layer in attention.cache.layers]
    with pytest.raises(WorkerError, match="no attention for device 'meta'"):
        select_attention(shape, attention.cache)  # type: ignore[arg-type]  # all that it reads of a model
