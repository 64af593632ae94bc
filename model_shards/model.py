"""What a runner needs of a model, and what a model needs of a runner: two protocols and no more.

Knows tensors of flat token batches; knows nothing of KV blocks, which stay behind `AttentionContext`.
"""

from typing import Protocol

from torch import Tensor

from model_shards.layers.rotary import Rotation


class AttentionContext(Protocol):
    """A layer's only way to KV memory and attention kernels, for the batch of one step."""

    def attend(
        self,
        layer: int,
        heads: Tensor,  # [tokens, local query heads + local KV heads, head_dim], those of the queries first
        value: Tensor,  # [tokens, local KV heads, head_dim]
        rotation: Rotation | None,  # None where positions are in the embedding
        window: int | None,
    ) -> Tensor:  # [tokens, local query heads, head_dim]
        """Rotate `heads`, write keys and `value` to the cache of `layer`, then attend causally over each sequence.

        With a `window` a token sees no more than that many keys, the last of them its own.
        """
        ...


class ShardedModel(Protocol):
    """One rank's shard of a decoder-only language model."""

    num_layers: int
    num_local_query_heads: int
    num_local_kv_heads: int
    head_dim: int
    vocab_size: int  # of the whole model, without padding
    local_vocab_start: int  # first vocabulary id whose logits this rank computes
    local_vocab_size: int  # how many of them, without padding; ranks cover the vocabulary in rank order
    has_static_shapes: bool  # its computation follows from the number of tokens, not from their values

    def forward(
        self,
        token_ids: Tensor,  # [tokens] int64
        positions: Tensor,  # [tokens] int64
        attention: AttentionContext,
    ) -> Tensor:  # [tokens, hidden]
        """Final hidden states, after the last norm; equal on every rank."""
        ...

    def local_logits(
        self,
        hidden: Tensor,  # [rows, hidden]
    ) -> Tensor:  # [rows, local_vocab_size] float32
        """Logits of the vocabulary ids [local_vocab_start, local_vocab_start + local_vocab_size)."""
        ...
