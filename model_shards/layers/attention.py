"""Attention around the kernel: fused query-key-value product, head norms, output product.

Knows this rank's heads; rotation, KV memory and kernels stay behind `AttentionContext`.
"""

import torch
from torch import Tensor, nn

from model_shards.layers.linear import Linear, RowParallelLinear
from model_shards.layers.norm import RmsNorm
from model_shards.layers.placement import Placement
from model_shards.layers.rotary import Rotation
from model_shards.model import AttentionContext
from model_shards.spec import ModelSpec


class Attention(nn.Module):
    """One layer's attention over `num_query_heads` and `num_kv_heads` local heads, which stand in one ratio."""

    query_norm: RmsNorm | None
    key_norm: RmsNorm | None

    def __init__(
        self,
        spec: ModelSpec,
        layer: int,
        num_query_heads: int,
        num_kv_heads: int,
        placement: Placement,
    ) -> None:
        super().__init__()
        self._layer = layer
        self._window = spec.window_of(layer)
        self._num_query_heads = num_query_heads
        self._num_positional_heads = num_query_heads + num_kv_heads
        self._head_dim = spec.head_dim
        self.qkv = Linear(
            (num_query_heads + 2 * num_kv_heads) * spec.head_dim,
            spec.hidden_size,
            placement,
            bias=spec.qkv_bias,
        )
        self.output = RowParallelLinear(
            spec.hidden_size,
            num_query_heads * spec.head_dim,
            placement,
            bias=spec.output_bias,
        )
        self.query_norm = (
            RmsNorm(spec.head_dim, spec.norm_epsilon, placement.dtype) if spec.query_key_norm else None
        )
        self.key_norm = RmsNorm(spec.head_dim, spec.norm_epsilon, placement.dtype) if spec.query_key_norm else None

    def forward(
        self,
        hidden: Tensor,  # [tokens, hidden]
        rotation: Rotation | None,  # None where positions are in the embedding
        attention: AttentionContext,
    ) -> Tensor:  # [tokens, hidden], equal on every rank
        heads = self.qkv(hidden).unflatten(1, (-1, self._head_dim))
        positional, value = heads[:, : self._num_positional_heads], heads[:, self._num_positional_heads :]
        if self.query_norm is not None and self.key_norm is not None:
            query, key = positional[:, : self._num_query_heads], positional[:, self._num_query_heads :]
            positional = torch.cat((self.query_norm(query), self.key_norm(key)), dim=1)
        attended = attention.attend(self._layer, positional, value, rotation, self._window)
        output: Tensor = self.output(attended.flatten(1))
        return output
