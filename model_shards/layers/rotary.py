"""Rotary position angles: one table a model, read once a step and used by every layer.

Knows positions; knows nothing of heads, layers or ranks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rotation:
    """The angles of one step's tokens."""

    cosine: Tensor  # [tokens, 1, head_dim / 2]
    sine: Tensor  # [tokens, 1, head_dim / 2]


class RotaryTable:
    """Cosines and sines of every position up to `max_positions`, in float32 until they are cast once."""

    def __init__(
        self, head_dim: int, max_positions: int, theta: float, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        pairs = torch.arange(0, head_dim, 2, dtype=torch.int64).to(device=device, dtype=torch.float32)
        frequencies = 1.0 / (theta ** (pairs / head_dim))
        angles = torch.arange(max_positions, device=device, dtype=torch.float32)[:, None] * frequencies
        self._cosine = angles.cos().to(dtype).unsqueeze(1)
        self._sine = angles.sin().to(dtype).unsqueeze(1)

    def at(
        self,
        positions: Tensor,  # [tokens] int64
    ) -> Rotation:
        return Rotation(self._cosine[positions], self._sine[positions])
