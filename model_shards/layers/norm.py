"""The norms with their weights. Knows nothing of ranks: every rank norms whole rows, to equal bits."""

import torch
from torch import Tensor, nn

from model_shards.layers import ops
from model_shards.layers.linear import empty_parameter


class RmsNorm(nn.Module):
    """Norms the last dimension; `add` takes the residual sum with it."""

    weight: nn.Parameter

    def __init__(self, size: int, epsilon: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = empty_parameter(size, dtype=dtype)
        self._epsilon = epsilon

    def forward(
        self,
        rows: Tensor,  # [..., size]
    ) -> Tensor:  # [..., size]
        return ops.rms_norm(rows, self.weight, self._epsilon)

    def add(
        self,
        update: Tensor,  # [tokens, size]
        residual: Tensor,  # [tokens, size]
    ) -> tuple[Tensor, Tensor]:
        """The normed sum, and the sum as the next residual."""
        return ops.add_rms_norm(update, residual, self.weight, self._epsilon)


class LayerNorm(nn.Module):
    """Norms the last dimension to mean 0 and deviation 1, then scales and shifts it; `add` as above."""

    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(self, size: int, epsilon: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = empty_parameter(size, dtype=dtype)
        self.bias = empty_parameter(size, dtype=dtype)
        self._epsilon = epsilon

    def forward(
        self,
        rows: Tensor,  # [..., size]
    ) -> Tensor:  # [..., size]
        return ops.layer_norm(rows, self.weight, self.bias, self._epsilon)

    def add(
        self,
        update: Tensor,  # [tokens, size]
        residual: Tensor,  # [tokens, size]
    ) -> tuple[Tensor, Tensor]:
        """The normed sum, and the sum as the next residual."""
        return ops.add_layer_norm(update, residual, self.weight, self.bias, self._epsilon)
