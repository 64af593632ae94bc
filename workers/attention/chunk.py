"""Attention over one chunk of keys on a CPU: torch's fused kernel where it keeps the rule, else by products.

The rule: a row of the result has the same bits in any call with a multiple of four rows. The fused kernel is an
internal operation of torch, so a probe decides. Knows matrices; knows nothing of sequences or blocks.
"""

from functools import cache
from typing import Protocol

import torch
from torch import Tensor

ROW_MULTIPLE = 4
_PROBE_ROWS = (4, 8, 36)
_PROBE_BATCH = 200  # rows: above the bounds where the fused kernel takes larger tiles


class ChunkKernel(Protocol):
    """Attention of some rows over the keys of one chunk."""

    def __call__(
        self,
        query: Tensor,  # [sequences, KV heads, rows, head_dim], float32, a multiple of ROW_MULTIPLE rows
        keys: Tensor,  # [sequences, KV heads, chunk keys, head_dim]
        values: Tensor,  # [sequences, KV heads, chunk keys, head_dim]
        mask: Tensor,  # [sequences or 1, 1, rows or 1, chunk keys]: 0 where a row sees a key, else -inf
        scale: float,
    ) -> tuple[Tensor, Tensor]:  # the result, shaped like query; the log-sum-exp of each row's scores
        ...


def chunk_kernel(group_size: int, chunk_tokens: int, head_dim: int) -> ChunkKernel:
    """The kernel for such chunks, where `group_size` query heads share a KV head."""
    return fused if fused_works(group_size, chunk_tokens, head_dim) else by_products


def fused(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """torch's flash attention for CPUs."""
    result, weight = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, 0.0, False, attn_mask=mask, scale=scale
    )
    return result, weight


def by_products(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The same in public operations. Each product has four rows, so nothing about it depends on the batch."""
    sequences, heads, num_rows, _ = query.shape
    result = torch.empty_like(query, memory_format=torch.contiguous_format)
    weight = torch.empty((sequences, heads, num_rows))
    masks = mask.expand(sequences, 1, num_rows, mask.shape[-1])
    for sequence in range(sequences):
        for head in range(heads):
            transposed = keys[sequence, head].t()
            for start in range(0, num_rows, ROW_MULTIPLE):
                rows = slice(start, start + ROW_MULTIPLE)
                scores = (query[sequence, head, rows] @ transposed).mul_(scale).add_(masks[sequence, 0, rows])
                lengths = torch.logsumexp(scores, dim=-1)
                weight[sequence, head, rows] = lengths
                result[sequence, head, rows] = scores.sub_(lengths.unsqueeze(-1)).exp_() @ values[sequence, head]
    return result, weight


@cache
def fused_works(group_size: int, chunk_tokens: int, head_dim: int) -> bool:
    """Whether this build of torch has the fused kernel, and it is right and keeps the rule for such chunks."""
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (
        torch.randn((1, 1, rows, head_dim), generator=generator)
        for rows in (_PROBE_BATCH, chunk_tokens, chunk_tokens)
    )
    stops = torch.arange(_PROBE_BATCH).floor_divide(group_size) + chunk_tokens // 2
    hidden = torch.arange(chunk_tokens) >= stops.unsqueeze(1)
    mask = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)[None, None]
    scale = head_dim**-0.5
    try:
        whole = fused(query, keys, values, mask, scale)
        parts = [fused(query[:, :, :n], keys, values, mask[:, :, :n], scale) for n in _PROBE_ROWS]
    except (AttributeError, RuntimeError, NotImplementedError, TypeError, ValueError):
        return False  # not in this build, or other arguments or results
    expected = by_products(query, keys, values, mask, scale)
    parts_agree = all(
        torch.equal(found, of_whole[:, :, : found.shape[2]])
        for part in parts
        for found, of_whole in zip(part, whole, strict=True)
    )
    return parts_agree and all(
        found.shape == right.shape and torch.allclose(found, right, rtol=1e-4, atol=1e-5)
        for found, right in zip(whole, expected, strict=True)
    )
