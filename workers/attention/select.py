"""Which attention implementation a rank uses, and the seam between it and the runner.

Knows devices and implementations; knows nothing of batches.
"""

from typing import Protocol

from model_shards.model import AttentionContext, ShardedModel
from workers.attention.metadata import AttentionMetadata
from workers.attention.sdpa import PagedAttention
from workers.errors import WorkerError
from workers.kv_cache import KvCache


class Attention(Protocol):
    """Makes the attention context of a step."""

    def prepare(self, metadata: AttentionMetadata) -> AttentionContext:
        """Everything that is the same for all layers is worked out here, once. Valid for one forward pass."""
        ...


def select_attention(model: ShardedModel, cache: KvCache) -> Attention:
    """The implementation for the cache's device. Raises `WorkerError` where there is none."""
    if cache.device.type != "cpu":
        raise WorkerError(f"there is no attention for device {cache.device.type!r} yet; use device cpu")
    return PagedAttention(cache, model.num_local_query_heads)
