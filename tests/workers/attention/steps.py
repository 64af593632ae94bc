"""Random streams of queries, keys and values for tests of attention, and steps over them for that on a device."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.fakes.plain_attention import PlainAttention
from workers.attention.metadata import DeviceMetadata
from workers.attention.select import DeviceAttention
from workers.kv_cache import KvCache

LAYER = 1


@dataclass
class Shape:
    num_local_query_heads: int
    num_local_kv_heads: int
    head_dim: int
    num_layers: int = 2


class Stream:
    """One sequence's queries, keys and values, and what dense attention makes of them."""

    def __init__(
        self, shape: Shape, num_tokens: int, blocks: Sequence[int], seed: int, window: int | None = None
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def drawn(heads: int) -> Tensor:
            return torch.randn(num_tokens, heads, shape.head_dim, generator=generator)

        self.heads = drawn(shape.num_local_query_heads + shape.num_local_kv_heads)
        self.value = drawn(shape.num_local_kv_heads)
        self.blocks = list(blocks)
        self.expected = PlainAttention().attend(0, self.heads, self.value, None, window)


def make_cache(shape: Shape, num_blocks: int, block_size: int) -> KvCache:
    return KvCache(shape, num_blocks=num_blocks, block_size=block_size, dtype="float32", device="cpu")


def make_streams(shape: Shape, lengths: Sequence[int], block_size: int, window: int | None = None) -> list[Stream]:
    """Their blocks are shuffled over a cache of `count_blocks` blocks."""
    total = count_blocks(lengths, block_size)
    free = torch.randperm(total, generator=torch.Generator().manual_seed(0)).tolist()
    return [
        Stream(shape, length, [free.pop() for _ in range(-(-length // block_size))], seed, window)
        for seed, length in enumerate(lengths)
    ]


def count_blocks(lengths: Sequence[int], block_size: int) -> int:
    return sum(-(-length // block_size) for length in lengths)


def metadata_of(streams: Sequence[Stream], spans: Sequence[tuple[int, int]], block_size: int) -> DeviceMetadata:
    """A step that computes tokens [start, end) of each stream. Those of one token must come first."""
    counts = [end - start for start, end in spans]
    num_decodes = sum(count == 1 for count in counts)
    assert all(count == 1 for count in counts[:num_decodes])
    width = max(-(-end // block_size) for _, end in spans)
    tables = [(stream.blocks + [stream.blocks[0]] * width)[:width] for stream in streams]
    slots = [
        stream.blocks[place // block_size] * block_size + place % block_size
        for stream, (start, end) in zip(streams, spans, strict=True)
        for place in range(start, end)
    ]
    prompts = spans[num_decodes:]
    return DeviceMetadata(
        torch.tensor(slots),
        torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32),
        torch.tensor([end for _, end in spans], dtype=torch.int32),
        torch.tensor(tables, dtype=torch.int32),
        num_decodes,
        longest_query=max(counts),
        longest_context=max(end for _, end in spans),
        num_prompt_keys=sum(end for _, end in prompts),
        fresh_prompts=all(start == 0 for start, _ in prompts),
    )


def attend(
    attention: DeviceAttention,
    block_size: int,
    streams: Sequence[Stream],
    spans: Sequence[tuple[int, int]],
    window: int | None = None,
) -> list[Tensor]:
    """What attention gives for each stream's tokens of one step."""
    step = attention.prepare(metadata_of(streams, spans, block_size))

    def packed(name: str) -> Tensor:
        parts = [getattr(stream, name)[slice(*span)] for stream, span in zip(streams, spans, strict=True)]
        return torch.cat(parts)

    out = step.attend(LAYER, packed("heads"), packed("value"), None, window)
    return list(torch.split(out, [end - start for start, end in spans]))


def check_steps(
    attention: DeviceAttention,
    block_size: int,
    streams: Sequence[Stream],
    steps: Sequence[Sequence[tuple[int, tuple[int, int]]]],  # (stream, span) of each sequence, decodes first
    window: int | None = None,
) -> None:
    """Run the steps one after the other and compare every token with dense attention."""
    for step in steps:
        members = [streams[number] for number, _ in step]
        spans = [span for _, span in step]
        for stream, span, found in zip(
            members, spans, attend(attention, block_size, members, spans, window), strict=True
        ):
            torch.testing.assert_close(found, stream.expected[slice(*span)], rtol=1e-5, atol=1e-5)
