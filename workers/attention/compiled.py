"""Paged attention on a CPU by compiled kernels, straight from the blocks: nothing is gathered, padded or masked.

A token's result depends on its query, its keys and its position only (model_shards.cpu_kernels), so it has the
same bits in any batch and for any chunking of its prompt. Knows KV blocks and shapes; knows nothing of sequences,
models or sampling.
"""

import numpy as np
import torch
from torch import Tensor

from model_shards.cpu_kernels.kernels import HEAD_DIM_UNIT, CpuKernels, PagedQueries
from model_shards.cpu_kernels.load import cpu_kernels
from model_shards.layers.rotary import Rotation
from workers.attention.metadata import AttentionMetadata
from workers.kv_cache import KvCache


class CompiledAttention:
    """Attention over a float32 `KvCache`."""

    def __init__(self, cache: KvCache, kernels: CpuKernels) -> None:
        self.cache = cache
        self.kernels = kernels

    def prepare(self, metadata: AttentionMetadata) -> "CompiledStep":
        return CompiledStep(self, metadata)


class CompiledStep:
    """The `AttentionContext` of one step."""

    def __init__(self, attention: CompiledAttention, metadata: AttentionMetadata) -> None:
        self._cache = attention.cache
        self._kernels = attention.kernels
        self._slots = attention.cache.token_rows(metadata.slots)
        rows = np.array([(query.first, query.count, query.context) for query in metadata.queries], dtype=np.int64)
        num_scores = int(rows[:, 1] @ rows[:, 2])
        self._queries = PagedQueries(torch.from_numpy(rows), torch.from_numpy(metadata.block_tables), num_scores)

    def attend(
        self,
        layer: int,
        heads: Tensor,  # [tokens, local query heads + local KV heads, head_dim]
        value: Tensor,  # [tokens, local KV heads, head_dim]
        rotation: Rotation | None,
        window: int | None,
    ) -> Tensor:  # [tokens, local query heads, head_dim]
        """Rotate and store, then attend causally over each sequence so far."""
        query, _ = self._cache.store(layer, self._slots, heads, value, rotation)
        return self._kernels.attend(query, self._cache.layers[layer], self._queries, window)


def kernels_or_refusal(cache: KvCache) -> CpuKernels | str:
    """What attends over such a cache, or why nothing compiled does."""
    if cache.dtype != torch.float32:
        return f"compiled kernels compute in float32, not {cache.dtype}"
    if cache.head_dim % HEAD_DIM_UNIT:
        return f"compiled kernels take heads of a multiple of {HEAD_DIM_UNIT}, the model's have {cache.head_dim}"
    return cpu_kernels() or "there are no compiled kernels"
