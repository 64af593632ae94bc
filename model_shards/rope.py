"""How rotary frequencies are stretched beyond the context a model was first trained with: a closed set of rules.

Plain numbers from a config; the arithmetic is in `layers.rotary`. Knows nothing of files, ranks or torch.

There is no rule for *dynamic* scaling. It changes nothing up to the model's own positions; beyond them its
frequencies depend on how long the sequence was when a key was cached, so a token's result would depend on the
chunks its prompt came in. Such models run as they are, up to their own positions (see `weights.rope_config`).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """All frequencies divided by one factor."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Long wavelengths divided by a factor, short ones kept, those between blended (Llama 3.1)."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_positions: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """A ramp from kept to divided frequencies, and queries and keys scaled (Peng et al., arXiv:2309.00071)."""

    factor: float
    original_positions: int
    fast_rotations: float  # dimensions that turn at least this often over the original positions are kept
    slow_rotations: float  # those that turn at most this often are divided
    attention_factor: float  # times cosines and sines
    truncate: bool  # the ramp starts and ends at whole dimensions


@dataclass(frozen=True, slots=True)
class DividedFrequencies:
    """Each frequency divided by a number of its own, as GGUF files write the rule of Llama 3.1."""

    divisors: tuple[float, ...]  # head_dim / 2


RopeScaling = DividedFrequencies | LinearScaling | Llama3Scaling | YarnScaling
