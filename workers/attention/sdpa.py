"""Paged attention on CPU that gives a token the same bits in any batch and for any chunking of its prompt.

The keys of a sequence are cut into *chunks* of 256, counted from its first token. Attention over one chunk is
one call of torch's fused CPU kernel with a fixed number of keys, masked beyond the sequence's end, and chunks
are joined in order by their log-sum-exps (the rule of flash decoding). The query heads of a KV group are folded
into the rows of one matrix and the rows padded to a multiple of four: below four rows the matrix products under
the kernel choose another order of summation. So a row's result depends on its query, its keys and its position
only. It is computed in float32 whatever the cache holds, because 16-bit kernels choose their order by the
number of rows.

Decodes share calls: those whose contexts reach a chunk, a few at a time, so that what was gathered from the
cache is read while it is still near the core.

Knows KV blocks and shapes; knows nothing of sequences, models or sampling.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from workers.attention.metadata import AttentionMetadata, QueryRange
from workers.kv_cache import KvCache

CHUNK_TOKENS = (
    256  # keys a kernel call sees; block sizes that do not divide it get the multiple below, or one block
)
_ROW_MULTIPLE = 4
_GATHER_BYTES = 2 * 2**20  # keys and values gathered for one call over decodes: about what a core's caches hold


@dataclass(frozen=True, slots=True)
class _DecodeCall:
    """One kernel call over the decodes [start, stop), for their chunk number `chunk`."""

    chunk: int
    start: int
    stop: int
    rows: Tensor  # for KvCache.gather
    mask: Tensor  # [stop - start, 1, 1, chunk keys]


@dataclass(frozen=True, slots=True)
class _PromptCall:
    """One kernel call over the query tokens from `first_token` on of one sequence, for one chunk."""

    first_token: int
    rows: Tensor
    mask: Tensor  # [1, 1, folded rows or 1, chunk keys]


@dataclass(frozen=True, slots=True)
class _Prompt:
    """The calls of a sequence with several query tokens."""

    query: QueryRange
    calls: tuple[_PromptCall, ...]


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
        self._gathered = torch.empty(
            (
                self.decodes_per_call * 2 * cache.num_heads * self.blocks_per_chunk,
                cache.block_size * cache.head_dim,
            ),
            dtype=cache.dtype,
        )

    def prepare(self, metadata: AttentionMetadata) -> "StepAttention":
        """Plan the kernel calls of one step."""
        num_decodes = metadata.num_decodes
        prompts = [self._plan_prompt(metadata, index) for index in range(num_decodes, len(metadata.queries))]
        return StepAttention(self, metadata, self._plan_decodes(metadata), prompts)

    def read(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the gathered chunks, each [sequences, KV heads, chunk keys, head_dim] in float32."""
        cache = self.cache
        gathered = cache.gather(layer, rows, self._gathered[: len(rows)])
        both = gathered.view(2, -1, cache.num_heads, self.chunk_tokens, cache.head_dim).float()
        return both[0], both[1]

    def _plan_decodes(self, metadata: AttentionMetadata) -> list[_DecodeCall]:
        if metadata.num_decodes == 0:
            return []
        contexts = np.array([query.context for query in metadata.queries[: metadata.num_decodes]])
        tables = torch.from_numpy(metadata.block_tables)
        calls = []
        for chunk in range(-(-int(contexts[0]) // self.chunk_tokens)):
            left = contexts - chunk * self.chunk_tokens
            reaching = int(np.count_nonzero(left > 0))
            masks = self._mask(torch.from_numpy(left[:reaching])).view(reaching, 1, 1, self.chunk_tokens)
            blocks = self._blocks_of_chunk(tables, chunk)
            for start in range(0, reaching, self.decodes_per_call):
                stop = min(start + self.decodes_per_call, reaching)
                rows = self.cache.block_rows(blocks[start:stop])
                calls.append(_DecodeCall(chunk, start, stop, rows, masks[start:stop]))
        return calls

    def _plan_prompt(self, metadata: AttentionMetadata, index: int) -> _Prompt:
        query = metadata.queries[index]
        table = torch.from_numpy(metadata.block_tables[index : index + 1])
        calls = []
        for chunk in range(-(-query.context // self.chunk_tokens)):
            begin = chunk * self.chunk_tokens
            position = query.context - query.count
            first_token = max(0, begin - position)  # tokens before it see nothing of this chunk
            if position + first_token >= begin + self.chunk_tokens - 1:
                mask = torch.zeros((1, 1, 1, self.chunk_tokens))
            else:
                visible = torch.arange(position + first_token + 1 - begin, query.context + 1 - begin)
                mask = self._mask(self._pad_rows(visible.repeat_interleave(self.group_size)))[None, None]
            rows = self.cache.block_rows(self._blocks_of_chunk(table, chunk))
            calls.append(_PromptCall(first_token, rows, mask))
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

    def _mask(
        self,
        visible: Tensor,  # [rows]: how many keys of the chunk each row sees
    ) -> Tensor:  # [rows, chunk keys]
        hidden = torch.arange(self.chunk_tokens) >= visible[:, None]
        return torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)

    def _pad_rows(self, rows: Tensor) -> Tensor:
        """Repeat the last row until their number is a multiple of four."""
        missing = -len(rows) % _ROW_MULTIPLE
        return torch.cat([rows, rows[-1:].expand(missing, *rows.shape[1:])]) if missing else rows


class StepAttention:
    """The `AttentionContext` of one step."""

    def __init__(
        self,
        attention: PagedAttention,
        metadata: AttentionMetadata,
        decode_calls: list[_DecodeCall],
        prompts: list[_Prompt],
    ) -> None:
        self._attention = attention
        self._cache = attention.cache
        self._num_decodes = metadata.num_decodes
        self._decode_calls = decode_calls
        self._prompts = prompts
        self._slots = attention.cache.token_rows(metadata.slots)
        self._scale = attention.cache.head_dim**-0.5

    def attend(
        self,
        layer: int,
        query: Tensor,  # [tokens, local query heads, head_dim]
        key: Tensor,  # [tokens, local KV heads, head_dim], rotated
        value: Tensor,  # [tokens, local KV heads, head_dim]
    ) -> Tensor:  # [tokens, local query heads, head_dim]
        """Store `key` and `value`, then attend causally over each sequence so far."""
        self._cache.write(layer, self._slots, key, value)
        out = torch.empty_like(query)
        if self._decode_calls:
            self._attend_decodes(layer, query[: self._num_decodes], out[: self._num_decodes])
        for prompt in self._prompts:
            tokens = slice(prompt.query.first, prompt.query.first + prompt.query.count)
            self._attend_prompt(layer, prompt, query[tokens], out[tokens])
        return out

    def _attend_decodes(self, layer: int, query: Tensor, out: Tensor) -> None:
        heads, group_size = self._cache.num_heads, self._attention.group_size
        folded = query.float().view(-1, heads, group_size, self._cache.head_dim)
        padding = -group_size % _ROW_MULTIPLE
        if padding:
            folded = torch.nn.functional.pad(folded, (0, 0, 0, padding))
        several_chunks = self._decode_calls[-1].chunk > 0
        total = _Joined(folded.shape) if several_chunks else None
        for call in self._decode_calls:
            result, weight = self._kernel(layer, folded[call.start : call.stop], call.rows, call.mask)
            if total is None:
                out[call.start : call.stop].view(-1, heads, group_size, self._cache.head_dim).copy_(
                    result[:, :, :group_size]
                )
            else:
                total.add(slice(call.start, call.stop), slice(None), result, weight, first=call.chunk == 0)
        if total is not None:
            out.view(-1, heads, group_size, self._cache.head_dim).copy_(total.result()[:, :, :group_size])

    def _attend_prompt(self, layer: int, prompt: _Prompt, query: Tensor, out: Tensor) -> None:
        heads, group_size, head_dim = self._cache.num_heads, self._attention.group_size, self._cache.head_dim
        num_rows = prompt.query.count * group_size
        # One more multiple of padding than needed here: a later chunk starts at any row and is padded from there.
        folded = query.new_zeros((1, heads, num_rows + 2 * _ROW_MULTIPLE, head_dim), dtype=torch.float32)
        by_head = folded[0, :, :num_rows].view(heads, -1, group_size, head_dim)
        by_head.copy_(query.view(-1, heads, group_size, head_dim).transpose(0, 1))
        total = _Joined(folded.shape) if len(prompt.calls) > 1 else None
        for chunk, call in enumerate(prompt.calls):
            first = call.first_token * group_size
            stop = first + -(-(num_rows - first) // _ROW_MULTIPLE) * _ROW_MULTIPLE
            result, weight = self._kernel(layer, folded[:, :, first:stop], call.rows, call.mask)
            if total is not None:
                total.add(slice(None), slice(first, stop), result, weight, first=chunk == 0)
        joined = result if total is None else total.result()
        by_token = joined[0, :, :num_rows].view(heads, -1, group_size, head_dim).transpose(0, 1)
        out.view(-1, heads, group_size, head_dim).copy_(by_token)

    def _kernel(self, layer: int, query: Tensor, rows: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Attention over one chunk, and the log-sum-exp of its scores: its weight among the chunks."""
        keys, values = self._attention.read(layer, rows)
        result, weight = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, keys, values, 0.0, False, attn_mask=mask, scale=self._scale
        )
        return result, weight


class _Joined:
    """The running union of chunks: numerator, denominator and greatest log-sum-exp of each row.

    Uses one elementary operation at a time: those give equal bits for any shape, fused ones need not.
    """

    def __init__(self, shape: torch.Size) -> None:
        self._numerator = torch.zeros(shape)
        self._denominator = torch.ones((*shape[:-1], 1))
        self._greatest = torch.zeros((*shape[:-1], 1))

    def add(self, sequences: slice, rows: slice, result: Tensor, weight: Tensor, *, first: bool) -> None:
        numerator = self._numerator[sequences, :, rows]
        denominator = self._denominator[sequences, :, rows]
        greatest = self._greatest[sequences, :, rows]
        weight = weight.contiguous().unsqueeze(-1)
        if first:
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
