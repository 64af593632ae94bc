"""Dense causal attention that keeps every layer's keys and values: one sequence, no blocks, no surprises."""

import torch
from torch import Tensor

from model_shards.layers import ops
from model_shards.layers.rotary import Rotation


class PlainAttention:
    """An `AttentionContext` of one sequence. Feed the tokens in order, in chunks of any size."""

    def __init__(self) -> None:
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}

    def attend(
        self, layer: int, heads: Tensor, value: Tensor, rotation: Rotation | None, window: int | None
    ) -> Tensor:
        query, key = query_and_key(heads, value, rotation)
        keys = self._keys[layer] = torch.cat([*self._past(self._keys, layer), key])
        values = self._values[layer] = torch.cat([*self._past(self._values, layer), value])
        ratio = query.shape[1] // key.shape[1]
        scores = torch.einsum("qhd,khd->hqk", query, keys.repeat_interleave(ratio, dim=1)) / query.shape[-1] ** 0.5
        past = keys.shape[0] - query.shape[0]
        visible = torch.ones(query.shape[0], keys.shape[0], dtype=torch.bool).tril(past)
        if window is not None:
            visible = visible.triu(past - window + 1)
        weights = scores.float().masked_fill(~visible, float("-inf")).softmax(dim=-1).to(query.dtype)
        return torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(ratio, dim=1))

    @staticmethod
    def _past(cache: dict[int, Tensor], layer: int) -> list[Tensor]:
        return [cache[layer]] if layer in cache else []


def query_and_key(heads: Tensor, value: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor]:
    """What `AttentionContext.attend` is given, rotated and parted."""
    rotated = heads if rotation is None else ops.rotate(heads, rotation)
    num_kv_heads = value.shape[1]
    return rotated[:, :-num_kv_heads], rotated[:, -num_kv_heads:]
