"""Rotary position angles: one table a model, read once a step and used by every layer.

Knows positions and the rules by which frequencies are stretched; knows nothing of heads, layers or ranks.
"""

import math
from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from model_shards.rope import DividedFrequencies, LinearScaling, Llama3Scaling, RopeScaling, YarnScaling


@dataclass(frozen=True, slots=True)
class Rotation:
    """The angles of one step's tokens."""

    cosine: Tensor  # [tokens, 1, head_dim], its halves alike
    sine: Tensor  # [tokens, 1, head_dim], its first half negative


class RotaryTable:
    """Cosines and sines of every position up to `max_positions`, in float32 until they are cast once."""

    def __init__(
        self,
        head_dim: int,
        max_positions: int,
        theta: float,
        scaling: RopeScaling | None = None,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        frequencies = scaled_frequencies(head_dim, theta, scaling).to(device)
        factor = scaling.attention_factor if isinstance(scaling, YarnScaling) else 1.0
        angles = torch.arange(max_positions, device=device, dtype=torch.float32)[:, None] * frequencies
        cosine, sine = angles.cos() * factor, angles.sin() * factor
        self._cosine = torch.cat((cosine, cosine), dim=1).to(dtype).unsqueeze(1)
        self._sine = torch.cat((-sine, sine), dim=1).to(dtype).unsqueeze(1)

    def at(
        self,
        positions: Tensor,  # [tokens] int64
    ) -> Rotation:
        return Rotation(self._cosine[positions], self._sine[positions])


def scaled_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None
) -> Tensor:  # [head_dim / 2] float32, radians a position
    pairs = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32)
    frequencies = 1.0 / (theta ** (pairs / head_dim))
    match scaling:
        case None:
            return frequencies
        case LinearScaling(factor):
            return frequencies / factor
        case DividedFrequencies(divisors):
            return frequencies / torch.tensor(divisors, dtype=torch.float32)
        case Llama3Scaling():
            return _llama3(frequencies, scaling)
        case YarnScaling():
            return _yarn(frequencies, theta, scaling)
        case _:
            assert_never(scaling)


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    kept_share = ((scaling.original_positions / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 - kept_share) * frequencies / scaling.factor + kept_share * frequencies


def _yarn(frequencies: Tensor, theta: float, scaling: YarnScaling) -> Tensor:
    size = 2 * len(frequencies)

    def dimension_that_turns(rotations: float) -> float:
        """Which dimension turns that often over the original positions."""
        return size * math.log(scaling.original_positions / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    first, last = dimension_that_turns(scaling.fast_rotations), dimension_that_turns(scaling.slow_rotations)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    ramp = (torch.arange(len(frequencies), dtype=torch.float32) - first) / (last - first or 0.001)
    divided_share = ramp.clamp(0.0, 1.0)
    return frequencies / scaling.factor * divided_share + frequencies * (1.0 - divided_share)
