"""Attention by the formula, in float32 and in plain operations of torch: what kernels are checked against.

Runs on any device and is slow: it gathers the whole block table of every token. `ReferenceAttention` waits for no
device, and its shapes follow from those of the metadata. Knows KV blocks and shapes; knows nothing of sequences'
tokens, models or sampling.
"""

from itertools import pairwise

import torch
from torch import Tensor

from model_shards.layers.rotary import Rotation
from workers.attention.metadata import DeviceMetadata
from workers.kv_cache import KvCache


class ReferenceAttention:
    """A `DeviceAttention` for checks."""

    def __init__(self, cache: KvCache) -> None:
        self.cache = cache

    def prepare(self, metadata: DeviceMetadata) -> "ReferenceStep":
        return ReferenceStep(self.cache, metadata)


class ReferenceStep:
    """The `AttentionContext` of one step."""

    def __init__(self, cache: KvCache, metadata: DeviceMetadata) -> None:
        self._cache = cache
        self._slots = cache.token_rows(metadata.slots)
        token = torch.arange(len(metadata.slots), device=metadata.slots.device, dtype=torch.int32)
        sequence = torch.searchsorted(metadata.starts[1:], token, right=True)
        after = metadata.starts[1:][sequence] - 1 - token  # tokens of the sequence that come later in this step
        self._stops = metadata.contexts[sequence] - after  # keys that each token may see
        self._tables = metadata.block_tables[sequence]

    def attend(
        self, layer: int, heads: Tensor, value: Tensor, rotation: Rotation | None, window: int | None
    ) -> Tensor:
        query, _ = self._cache.store(layer, self._slots, heads, value, rotation)
        return attend_by_formula(query, self._cache.layers[layer], self._tables, self._stops, window)


def attend_by_formula(
    query: Tensor,  # [tokens, query heads, head_dim]
    pages: Tensor,  # [2, KV heads, blocks, block_size, head_dim], keys first
    block_tables: Tensor,  # [tokens, blocks of a token] int32
    stops: Tensor,  # [tokens] int32: how many keys of its sequence a token sees
    window: int | None,
) -> Tensor:  # [tokens, query heads, head_dim]
    """A `DecodeKernel`, and with a table for each token of a prompt good for these too."""
    tokens, num_heads, head_dim = query.shape
    _, kv_heads, _, block_size, _ = pages.shape
    read = pages[:, :, block_tables.long()].float()  # [2, KV heads, tokens, blocks, block_size, head_dim]
    keys, values = read.view(2, kv_heads, tokens, -1, head_dim)
    grouped = query.float().view(tokens, kv_heads, num_heads // kv_heads, head_dim)
    scores = torch.einsum("thgd,htkd->thgk", grouped, keys) * head_dim**-0.5
    place = torch.arange(block_tables.shape[1] * block_size, device=query.device)
    seen = place < stops[:, None]
    if window is not None:
        seen &= place >= stops[:, None] - window
    weights = scores.masked_fill(~seen[:, None, None], -torch.inf).softmax(dim=-1)
    return torch.einsum("thgk,htkd->thgd", weights, values).reshape(query.shape).to(query.dtype)


def varlen_by_formula(
    query: Tensor,  # [queries, query heads, head_dim]
    key: Tensor,  # [keys, KV heads, head_dim], or with a table [blocks, block_size, KV heads, head_dim]
    value: Tensor,  # shaped like key
    cu_seq_q: Tensor,  # [sequences + 1]
    cu_seq_k: Tensor | None,  # [sequences + 1]
    max_q: int,
    max_k: int,
    *,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
) -> Tensor:  # [queries, query heads, head_dim]
    """What torch's `varlen_attn` promises, as far as it is used here. Reads lengths on the host."""
    left, right = window_size
    assert right == 0, "only causal attention is used here"
    assert enable_gqa or query.shape[1] == key.shape[-2], "the kernel refuses fewer KV heads without enable_gqa"
    ends = cu_seq_q.tolist()
    parts = []
    for index, (first, stop) in enumerate(pairwise(ends)):
        if block_table is not None and seqused_k is not None:
            length = int(seqused_k[index])
            keys, values = (pool[block_table[index].long()].flatten(0, 1)[:length] for pool in (key, value))
        else:
            assert cu_seq_k is not None, "without a table keys lie in runs"
            run = slice(int(cu_seq_k[index]), int(cu_seq_k[index + 1]))
            keys, values = key[run], value[run]
        count, length = stop - first, len(keys)
        assert count <= max_q, f"{count} queries, announced were {max_q} at the most"
        assert length <= max_k, f"{length} keys, announced were {max_k} at the most"
        stops = torch.arange(length - count, length, device=query.device, dtype=torch.int32) + 1
        pages = torch.stack((keys, values)).transpose(1, 2).unsqueeze(2)  # one block as long as the sequence
        table = torch.zeros((count, 1), dtype=torch.int32, device=query.device)
        window = None if left < 0 else left + 1
        parts.append(attend_by_formula(query[first:stop], pages, table, stops, window))
    return torch.cat(parts)
