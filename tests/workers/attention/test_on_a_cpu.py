"""Both paged attentions of a CPU against dense attention: all shapes of head group, block size and chunking."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from model_shards.cpu_kernels.load import cpu_kernels
from tests.workers.attention.steps import Shape, Stream, make_cache
from workers.attention.compiled import CompiledAttention
from workers.attention.metadata import AttentionMetadata, QueryRange
from workers.attention.sdpa import PagedAttention
from workers.attention.select import select_attention
from workers.errors import WorkerError

CpuAttention = PagedAttention | CompiledAttention
Maker = Callable[[Shape, int, int], CpuAttention]  # (shape, blocks, block size)


@pytest.fixture(params=["gathered", "compiled"])
def make_attention(request: pytest.FixtureRequest) -> Maker:
    return make_gathered if request.param == "gathered" else make_compiled


def make_gathered(shape: Shape, num_blocks: int, block_size: int) -> PagedAttention:
    return PagedAttention(make_cache(shape, num_blocks, block_size), shape.num_local_query_heads)


def make_compiled(shape: Shape, num_blocks: int, block_size: int) -> CompiledAttention:
    kernels = cpu_kernels()
    if kernels is None:
        pytest.skip("this machine has no C compiler")
    return CompiledAttention(make_cache(shape, num_blocks, block_size), kernels)


def attend(
    attention: CpuAttention,
    streams: Sequence[Stream],
    spans: Sequence[tuple[int, int]],
    *,
    window: int | None = None,
    layer: int = 1,
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

    out = context.attend(layer, packed("heads"), packed("value"), None, window)
    parts = dict(zip(order, torch.split(out, [query.count for query in queries]), strict=True))
    return [parts[i] for i in range(len(spans))]


def attend_in_random_chunks(
    attention: CpuAttention, streams: Sequence[Stream], window: int | None, seed: int
) -> list[Tensor]:
    """What attention gives for each whole stream, the last token of each as a decode, whatever came before."""
    lengths = [len(stream.value) for stream in streams]
    found: list[list[Tensor]] = [[] for _ in streams]
    done = [0] * len(streams)
    source = torch.Generator().manual_seed(seed)
    while any(place < length for place, length in zip(done, lengths, strict=True)):
        step = [i for i, length in enumerate(lengths) if done[i] < length]
        sizes = [int(torch.randint(1, 300, (), generator=source)) for _ in step]
        ends = [max(done[i] + 1, min(done[i] + size, lengths[i] - 1)) for i, size in zip(step, sizes, strict=True)]
        spans = [(done[i], end) for i, end in zip(step, ends, strict=True)]
        parts = attend(attention, [streams[i] for i in step], spans, window=window)
        for i, part, end in zip(step, parts, ends, strict=True):
            found[i].append(part)
            done[i] = end
    return [torch.cat(parts) for parts in found]


def make_streams(shape: Shape, block_size: int, window: int | None = None) -> list[Stream]:
    blocks = torch.randperm(200, generator=torch.Generator().manual_seed(0)).tolist()
    return [
        Stream(shape, length, [blocks.pop() for _ in range(-(-length // block_size))], seed, window)
        for seed, length in enumerate([1, 7, 255, 256, 257, 513, 600])
    ]


@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (6, 2), (3, 1), (2, 1), (1, 1), (4, 4), (8, 1), (10, 2)])
@pytest.mark.parametrize("block_size", [16, 24, 300])
def test_equals_dense_attention(make_attention: Maker, heads: int, kv_heads: int, block_size: int) -> None:
    shape = Shape(heads, kv_heads, head_dim=16)
    streams = make_streams(shape, block_size)
    found = attend_in_random_chunks(make_attention(shape, 200, block_size), streams, None, seed=1)
    for stream, result in zip(streams, found, strict=True):
        torch.testing.assert_close(result, stream.expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [1, 2, 100, 255, 256, 257, 300, 599, 600])
@pytest.mark.parametrize(("heads", "kv_heads", "block_size"), [(6, 2, 16), (9, 3, 24), (5, 5, 300)])
def test_a_window_equals_dense_attention(
    make_attention: Maker, heads: int, kv_heads: int, block_size: int, window: int
) -> None:
    shape = Shape(heads, kv_heads, head_dim=16)
    streams = make_streams(shape, block_size, window)
    found = attend_in_random_chunks(make_attention(shape, 200, block_size), streams, window, seed=1)
    for stream, result in zip(streams, found, strict=True):
        torch.testing.assert_close(result, stream.expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 1, 100, 256, 300])
def test_a_token_has_the_same_bits_in_any_batch_and_chunk(make_attention: Maker, window: int | None) -> None:
    shape = Shape(9, 3, head_dim=16)
    streams = make_streams(shape, 16)
    alone = [
        attend_in_random_chunks(make_attention(shape, 200, 16), [stream], window, seed=number)[0]
        for number, stream in enumerate(streams)
    ]
    for seed in range(2):
        together = attend_in_random_chunks(make_attention(shape, 200, 16), streams, window, seed=seed)
        assert all(torch.equal(left, right) for left, right in zip(alone, together, strict=True))


def test_chunks_before_every_window_are_not_read(make_attention: Maker) -> None:
    shape = Shape(4, 2, head_dim=16)
    attention = make_attention(shape, 200, 16)
    streams = make_streams(shape, 16, window=64)[-2:]  # 513 and 600 tokens
    for start, end in [(0, 512), (512, 513)]:
        attend(attention, streams, [(start, end), (start, end + 87)], window=64)
    for stream in streams:
        for block in stream.blocks[1 : 256 // 16]:  # the first stands in where a sequence has no block yet
            attention.cache.layers[1][:, :, block] = torch.nan
    found = attend(attention, streams, [(512, 513), (599, 600)], window=64)
    for stream, result in zip(streams, found, strict=True):
        torch.testing.assert_close(result[0], stream.expected[-1], rtol=1e-5, atol=1e-5)


def test_layers_of_one_step_may_have_different_windows(make_attention: Maker) -> None:
    shape = Shape(4, 2, head_dim=16)
    attention = make_attention(shape, 2, 16)
    streams = {window: Stream(shape, 20, [1, 0], 0, window) for window in (None, 3)}
    step = attention.prepare(AttentionMetadata(torch.arange(20), (QueryRange(0, 20, 20),), 0, np.array([[0, 1]])))
    for layer, (window, stream) in enumerate(streams.items()):
        found = step.attend(layer, stream.heads, stream.value, None, window)
        torch.testing.assert_close(found, stream.expected, rtol=1e-5, atol=1e-5)


def test_more_decodes_than_one_call_holds() -> None:
    shape = Shape(9, 3, head_dim=64)
    attention = make_gathered(shape, 64, 16)
    count = 3 * attention.decodes_per_call + 1
    streams = [Stream(shape, 1 + number % 3, [number], number) for number in range(count)]
    for place in range(3):
        here = [number for number in range(count) if len(streams[number].value) > place]
        parts = attend(attention, [streams[number] for number in here], [(place, place + 1)] * len(here))
        for number, part in zip(here, parts, strict=True):
            torch.testing.assert_close(part[0], streams[number].expected[place], rtol=1e-5, atol=1e-5)


def test_what_a_block_held_before_does_not_show(make_attention: Maker) -> None:
    shape = Shape(4, 2, head_dim=16)
    stream = Stream(shape, 21, [1, 0], seed=0)
    fresh, used = make_attention(shape, 2, 16), make_attention(shape, 2, 16)
    for layer in used.cache.layers:
        layer.normal_(std=100)
    for attention in (fresh, used):
        attend(attention, [stream], [(0, 20)])
    (expected,), (found,) = (attend(attention, [stream], [(20, 21)]) for attention in (fresh, used))
    assert torch.equal(found, expected)


def test_no_kernel_for_a_device_is_said(make_attention: Maker) -> None:
    shape = Shape(4, 2, head_dim=16)
    attention = make_attention(shape, 2, 16)
    attention.cache.layers = [layer.to("meta") for layer in attention.cache.layers]
    with pytest.raises(WorkerError, match="no attention for device 'meta'"):
        select_attention(shape, attention.cache)  # type: ignore[arg-type]  # all that it reads of a model


@pytest.mark.parametrize(("heads", "kv_heads"), [(70, 1), (3, 1), (4, 2)])
@pytest.mark.parametrize("head_dim", [8, 24, 64, 80, 128])
def test_compiled_attention_takes_heads_of_any_size_and_many_of_one_key(
    heads: int, kv_heads: int, head_dim: int
) -> None:
    shape = Shape(heads, kv_heads, head_dim)
    streams = [Stream(shape, length, [block], seed=length) for block, length in enumerate((1, 33, 97))]
    found = attend_in_random_chunks(make_compiled(shape, 3, 100), streams, None, seed=1)
    for stream, result in zip(streams, found, strict=True):
        torch.testing.assert_close(result, stream.expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_threads", [2, 3])
def test_compiled_attention_gives_the_same_bits_on_several_threads(
    num_threads: int, intra_op_threads: Callable[[int], None]
) -> None:
    shape = Shape(9, 3, head_dim=16)
    streams = make_streams(shape, 16)
    alone = attend_in_random_chunks(make_compiled(shape, 200, 16), streams, None, seed=1)
    intra_op_threads(num_threads)
    shared = attend_in_random_chunks(make_compiled(shape, 200, 16), streams, None, seed=1)
    assert all(torch.equal(left, right) for left, right in zip(alone, shared, strict=True))


def test_a_number_that_is_none_shows_in_the_compiled_result() -> None:
    """Of a broken key or value, a result that looks sound would be the worst."""
    shape = Shape(2, 1, head_dim=16)
    for half in range(2):
        attention = make_compiled(shape, 3, 16)
        stream = Stream(shape, 40, [0, 1, 2], seed=0)
        attend(attention, [stream], [(0, 39)])
        attention.cache.layers[1][half, 0, 1, 3, 5] = torch.nan
        (found,) = attend(attention, [stream], [(39, 40)])
        assert found.isnan().any(dim=-1).all()
