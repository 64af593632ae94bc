"""Paged attention on CPU that gives a token the same bits in any batch and for any chunking of its prompt.

The keys of a sequence are cut into *chunks* of 256, counted from its first token. Attention over one chunk is
one call of a kernel (workers.attention.chunk) with a fixed number of keys, masked beyond the sequence's end, and
chunks are joined in order by their log-sum-exps (the rule of flash decoding). The query heads of a KV group are
folded into the rows of one matrix and the rows padded to a multiple of four: below four rows the matrix products
under the kernel choose another order of summation. So a row's result depends on its query, its keys and its
position only. It is computed in float32 whatever the cache holds, because 16-bit kernels choose their order by
the number of rows.

Decodes share calls: those whose contexts reach a chunk, a few at a time, so that what was gathered from the
cache is read while it is still near the core.

Under a sliding window the keys before a token's window are masked as well, and a chunk that lies before the
windows of all its tokens is not read. Every row of a call sees at least one key of its chunk.

Knows KV blocks and shapes; knows nothing of sequences, models or sampling.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from model_shards.layers.rotary import Rotation
from workers.attention.chunk import ROW_MULTIPLE, chunk_kernel
from workers.attention.metadata import AttentionMetadata, QueryRange
from workers.kv_cache import KvCache

CHUNK_TOKENS = (
    256  # keys a kernel call sees; block sizes that do not divide it get the multiple below, or one block
)
_GATHER_BYTES = 2 * 2**20  # keys and values gathered for one call over decodes: about what a core's caches hold


@dataclass(frozen=True, slots=True)
class _Chunks:
    """Where the keys and values of a kernel call are gathered: views, made once a step and not once a layer."""

    rows: Tensor  # for KvCache.gather
    buffer: Tensor  # [rows, block_size * head_dim]
    keys: Tensor  # [sequences, KV heads, chunk keys, head_dim]
    values: Tensor  # likewise

    def read(self, cache: KvCache, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values in float32, good until the next call over the same buffer."""
        cache.gather(layer, self.rows, self.buffer)
        if cache.dtype == torch.float32:
            return self.keys, self.values
        return self.keys.float(), self.values.float()


@dataclass(frozen=True, slots=True)
class _DecodeCall:
    """One kernel call over the decodes [start, stop), for their chunk number `chunk`."""

    chunk: int
    start: int
    stop: int
    is_first: bool  # for each of them the first chunk that it sees
    chunks: _Chunks
    mask: Tensor  # [stop - start, 1, 1, chunk keys]


@dataclass(frozen=True, slots=True)
class _PromptCall:
    """One kernel call over the query tokens [first_token, stop_token) of one sequence, for one chunk."""

    first_token: int
    stop_token: int
    is_first: bool
    chunks: _Chunks
    mask: Tensor  # [1, 1, folded rows or 1, chunk keys]


@dataclass(frozen=True, slots=True)
class _Prompt:
    """The calls of a sequence with several query tokens."""

    query: QueryRange
    calls: tuple[_PromptCall, ...]


@dataclass(frozen=True, slots=True)
class _Plan:
    """All kernel calls of one layer."""

    decode_calls: tuple[_DecodeCall, ...]
    prompts: tuple[_Prompt, ...]


class PagedAttention:
    """Attention over a `KvCache`. Owns the buffers that blocks are gathered into; used by one thread."""

    def __init__(self, cache: KvCache, num_query_heads: int) -> None:
        self.cache = cache
        self.num_query_heads = num_query_heads
        self.group_size = num_query_heads // cache.num_heads
        self.blocks_per_chunk = max(1, CHUNK_TOKENS // cache.block_size)
        self.chunk_tokens = self.blocks_per_chunk * cache.block_size
        call_bytes = 2 * cache.num_heads * self.chunk_tokens * cache.head_dim * 4
        self.decodes_per_call = max(1, _GATHER_BYTES // call_bytes)
        self.kernel = chunk_kernel(self.group_size, self.chunk_tokens, cache.head_dim)
        self._gathered = torch.empty(
            (
                self.decodes_per_call * 2 * cache.num_heads * self.blocks_per_chunk,
                cache.block_size * cache.head_dim,
            ),
            dtype=cache.dtype,
        )

    def prepare(self, metadata: AttentionMetadata) -> "StepAttention":
        return StepAttention(self, metadata)

    def plan(self, metadata: AttentionMetadata, window: int | None) -> _Plan:
        """The kernel calls of one step, for the layers with that window."""
        prompts = [
            self._plan_prompt(metadata, index, window)
            for index in range(metadata.num_decodes, len(metadata.queries))
        ]
        return _Plan(tuple(self._plan_decodes(metadata, window)), tuple(prompts))

    def _plan_decodes(self, metadata: AttentionMetadata, window: int | None) -> list[_DecodeCall]:
        if metadata.num_decodes == 0:
            return []
        contexts = np.array([query.context for query in metadata.queries[: metadata.num_decodes]])
        begins = _begin_of_window(contexts, window)
        tables = torch.from_numpy(metadata.block_tables)
        calls = []
        for chunk in range(int(begins[-1]) // self.chunk_tokens, -(-int(contexts[0]) // self.chunk_tokens)):
            # Contexts fall, so the decodes that still reach the chunk and those whose windows lie behind it are
            # at the two ends.
            origin = chunk * self.chunk_tokens
            beyond = int(np.count_nonzero(begins >= origin + self.chunk_tokens))
            reaching = int(np.count_nonzero(contexts > origin))
            masks = self._mask(contexts[:reaching] - origin, begins[:reaching] - origin)[:, None, None]
            blocks = self._blocks_of_chunk(tables, chunk)
            for start in range(beyond, reaching, self.decodes_per_call):
                stop = min(start + self.decodes_per_call, reaching)
                is_first = bool(begins[stop - 1] >= origin)
                chunks = self._chunks(blocks[start:stop])
                calls.append(_DecodeCall(chunk, start, stop, is_first, chunks, masks[start:stop]))
        return calls

    def _plan_prompt(self, metadata: AttentionMetadata, index: int, window: int | None) -> _Prompt:
        query = metadata.queries[index]
        table = torch.from_numpy(metadata.block_tables[index : index + 1])
        contexts = np.arange(query.context - query.count, query.context) + 1
        begins = _begin_of_window(contexts, window)
        calls = []
        for chunk in range(int(begins[0]) // self.chunk_tokens, -(-query.context // self.chunk_tokens)):
            origin = chunk * self.chunk_tokens
            end = origin + self.chunk_tokens
            first = int(np.count_nonzero(contexts <= origin))  # tokens before it see nothing of this chunk,
            stop = int(np.count_nonzero(begins < end))  # and from here on the window lies behind it
            if contexts[first] >= end and begins[stop - 1] <= origin:
                mask = torch.zeros((1, 1, 1, self.chunk_tokens))
            else:
                seen = [self._by_row(bounds[first:stop] - origin) for bounds in (contexts, begins)]
                mask = self._mask(*seen)[None, None]
            chunks = self._chunks(self._blocks_of_chunk(table, chunk))
            calls.append(_PromptCall(first, stop, bool(begins[first] >= origin), chunks, mask))
        return _Prompt(query, tuple(calls))

    def _blocks_of_chunk(
        self,
        tables: Tensor,  # [sequences, blocks]
        chunk: int,
    ) -> Tensor:  # [sequences, blocks of a chunk]
        blocks = tables[:, chunk * self.blocks_per_chunk : (chunk + 1) * self.blocks_per_chunk]
        missing = self.blocks_per_chunk - blocks.shape[1]
        if missing:  # read anything that the sequence owns; it is masked
            blocks = torch.cat([blocks, tables[:, :1].expand(-1, missing)], dim=1)
        return blocks

    def _chunks(
        self,
        blocks: Tensor,  # [sequences, blocks of a chunk]
    ) -> _Chunks:
        cache = self.cache
        rows = cache.block_rows(blocks)
        buffer = self._gathered[: len(rows)]
        keys, values = buffer.view(2, -1, cache.num_heads, self.chunk_tokens, cache.head_dim)
        return _Chunks(rows, buffer, keys, values)

    def _mask(
        self,
        stops: npt.NDArray[np.int64],  # [rows]
        starts: npt.NDArray[np.int64],  # [rows]
    ) -> Tensor:  # [rows, chunk keys]
        """Each row sees the keys [start, stop) of the chunk."""
        keys = torch.arange(self.chunk_tokens)
        hidden = keys >= torch.from_numpy(stops)[:, None]
        if starts.max() > 0:
            hidden |= keys < torch.from_numpy(starts)[:, None]
        return torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)

    def _by_row(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """One value a token -> one a folded row, the last repeated until their number is a multiple of four."""
        rows = tokens.repeat(self.group_size)
        return np.pad(rows, (0, -len(rows) % ROW_MULTIPLE), mode="edge")


def _begin_of_window(contexts: npt.NDArray[np.int64], window: int | None) -> npt.NDArray[np.int64]:
    """The first key that a token sees, by how many there are up to itself."""
    return np.zeros_like(contexts) if window is None else np.maximum(contexts - window, 0)


class StepAttention:
    """The `AttentionContext` of one step. What is the same for all layers of one window is worked out once."""

    def __init__(self, attention: PagedAttention, metadata: AttentionMetadata) -> None:
        self._attention = attention
        self._cache = attention.cache
        self._metadata = metadata
        self._num_decodes = metadata.num_decodes
        self._plans: dict[int | None, _Plan] = {}
        self._slots = attention.cache.token_rows(metadata.slots)
        self._scale = attention.cache.head_dim**-0.5
        self._folded = self._folded_queries(metadata.num_decodes)

    def attend(
        self,
        layer: int,
        heads: Tensor,  # [tokens, local query heads + local KV heads, head_dim]
        value: Tensor,  # [tokens, local KV heads, head_dim]
        rotation: Rotation | None,
        window: int | None,
    ) -> Tensor:  # [tokens, local query heads, head_dim]
        """Rotate and store, then attend causally over each sequence so far."""
        if window not in self._plans:
            self._plans[window] = self._attention.plan(self._metadata, window)
        plan = self._plans[window]
        query, _ = self._cache.store(layer, self._slots, heads, value, rotation)
        parts = []
        if plan.decode_calls:
            parts.append(self._attend_decodes(layer, plan.decode_calls, query[: self._num_decodes]))
        for prompt in plan.prompts:
            first, count = prompt.query.first, prompt.query.count
            parts.append(self._attend_prompt(layer, prompt, query[first : first + count]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_decodes(self, layer: int, calls: Sequence[_DecodeCall], query: Tensor) -> Tensor:
        folded = self._fold(query)
        if calls[0].chunk == calls[-1].chunk:
            results = [
                self._kernel(layer, folded[call.start : call.stop], call.chunks, call.mask)[0] for call in calls
            ]
            result = results[0] if len(results) == 1 else torch.cat(results)
        else:
            total = _Joined(folded.shape)
            for call in calls:
                part = self._kernel(layer, folded[call.start : call.stop], call.chunks, call.mask)
                total.add(slice(call.start, call.stop), slice(None), *part, first=call.is_first)
            result = total.result()
        return result[:, :, : self._attention.group_size].reshape(query.shape).to(query.dtype)

    def _folded_queries(self, num_decodes: int) -> Tensor:
        """[decodes, KV heads, group padded to a multiple of ROW_MULTIPLE, head_dim]: zeros, for `_fold`."""
        group_size = self._attention.group_size
        rows = group_size + -group_size % ROW_MULTIPLE
        return torch.zeros((num_decodes, self._cache.num_heads, rows, self._cache.head_dim))

    def _fold(self, query: Tensor) -> Tensor:
        """The decodes' query heads by KV head, in float32. Good until the next layer."""
        group_size = self._attention.group_size
        by_group = query.view(-1, self._cache.num_heads, group_size, self._cache.head_dim)
        self._folded[:, :, :group_size].copy_(by_group)
        return self._folded

    def _attend_prompt(self, layer: int, prompt: _Prompt, query: Tensor) -> Tensor:
        heads, group_size, head_dim = self._cache.num_heads, self._attention.group_size, self._cache.head_dim
        num_rows = prompt.query.count * group_size
        # One more multiple of padding than needed here: a later chunk starts at any row and is padded from there.
        folded = query.new_zeros((1, heads, num_rows + 2 * ROW_MULTIPLE, head_dim), dtype=torch.float32)
        by_head = folded[0, :, :num_rows].view(heads, -1, group_size, head_dim)
        by_head.copy_(query.view(-1, heads, group_size, head_dim).transpose(0, 1))
        total = _Joined(folded.shape) if len(prompt.calls) > 1 else None
        for call in prompt.calls:
            first, stop = call.first_token * group_size, call.stop_token * group_size
            padded_stop = stop + -(stop - first) % ROW_MULTIPLE
            result, weight = self._kernel(layer, folded[:, :, first:padded_stop], call.chunks, call.mask)
            if total is not None:
                rows = slice(first, stop)  # the padding may be rows that this chunk is not for
                seen = slice(0, stop - first)
                total.add(slice(None), rows, result[:, :, seen], weight[:, :, seen], first=call.is_first)
        joined = result if total is None else total.result()
        by_token = joined[0, :, :num_rows].view(heads, -1, group_size, head_dim).transpose(0, 1)
        return by_token.reshape(query.shape).to(query.dtype)

    def _kernel(self, layer: int, query: Tensor, chunks: _Chunks, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Attention over one chunk, and the log-sum-exp of its scores: its weight among the chunks."""
        keys, values = chunks.read(self._cache, layer)
        return self._attention.kernel(query, keys, values, mask, self._scale)


class _Joined:
    """The running union of chunks: numerator, denominator and greatest log-sum-exp of each row.

    Uses one elementary operation at a time: those give equal bits for any shape, fused ones need not.
    """

    def __init__(self, shape: torch.Size) -> None:
        self._numerator = torch.zeros(shape)
        self._denominator = torch.ones((*shape[:-1], 1))
        self._greatest = torch.full((*shape[:-1], 1), -torch.inf)

    def add(self, sequences: slice, rows: slice, result: Tensor, weight: Tensor, *, first: bool) -> None:
        numerator = self._numerator[sequences, :, rows]
        denominator = self._denominator[sequences, :, rows]
        greatest = self._greatest[sequences, :, rows]
        weight = weight.contiguous().unsqueeze(-1)
        if first:  # what the rest comes to for a row of nothing, with fewer operations
            numerator.copy_(result)
            greatest.copy_(weight)
            return
        new_greatest = torch.maximum(greatest, weight)
        old_factor = torch.exp(greatest - new_greatest)
        new_factor = torch.exp(weight - new_greatest)
        numerator.mul_(old_factor).add_(result * new_factor)
        denominator.mul_(old_factor).add_(new_factor)
        greatest.copy_(new_greatest)

    def result(self) -> Tensor:
        return self._numerator / self._denominator
