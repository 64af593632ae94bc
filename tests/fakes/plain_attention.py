"""Dense causal attention that keeps every layer's keys and values: one sequence, no blocks, no surprises."""

import torch
from torch import Tensor


class PlainAttention:
    """An `AttentionContext` of one sequence. Feed the tokens in order, in chunks of any size."""

    def __init__(self) -> None:
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None = None) -> Tensor:
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
