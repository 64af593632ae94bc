"""The rotary settings of a `config.json`: their theta, their scaling, and how far they reach. Torch-free.

`rope_scaling` beside `rope_theta` is the older spelling, `rope_parameters` that of transformers 5; where both are
there the older one counts, as it does for transformers. A key that we do not know is refused.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from model_shards.errors import UnsupportedModel
from model_shards.rope import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling
from model_shards.weights.fields import Fields

_ALWAYS_KNOWN = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_KNOWN: Mapping[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor", "original_max_position_embeddings"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
        "finetuned",  # a remark
    },
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    theta: float
    scaling: RopeScaling | None
    max_positions: int  # that the rotation is made for


def read_rope_config(config: Fields, default_theta: float) -> RopeConfig:
    """Raises `UnsupportedModel` naming the setting, or `CheckpointError` for one of a wrong type."""
    key = "rope_scaling" if config.values.get("rope_scaling") else "rope_parameters"
    settings = config.values.get(key) or {}
    if not isinstance(settings, Mapping):
        raise UnsupportedModel(f"{config.file}: {key} = {settings!r} is not supported")
    if any(isinstance(value, Mapping) for value in settings.values()):
        raise UnsupportedModel(f"{config.file}: {key} that differ between layers are not supported")
    rope = Fields(config.file, settings)
    kind = settings.get("rope_type", settings.get("type", "default"))
    known = _KNOWN.get(kind) if isinstance(kind, str) else None
    if known is None:
        raise UnsupportedModel(
            f"{config.file}: {key} of type {kind!r} is not supported; we run {', '.join(_KNOWN)}"
        )
    for unknown in sorted(settings.keys() - known - _ALWAYS_KNOWN):
        raise UnsupportedModel(f"{config.file}: {key}.{unknown} is not supported with type {kind!r}")
    if rope.number("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel(f"{config.file}: {key}.partial_rotary_factor is not supported")
    theta = rope.number("rope_theta", config.number("rope_theta", default_theta))
    positions = config.integer("max_position_embeddings")
    match kind:
        case "linear":
            factor = _factor(rope, key, None)
            return RopeConfig(theta, LinearScaling(factor), int(positions * factor))
        case "llama3":
            return RopeConfig(theta, _llama3(config, rope, key, positions), positions)
        case "yarn":
            yarn = _yarn(config, rope, key, positions)
            return RopeConfig(theta, yarn, max(positions, int(yarn.original_positions * yarn.factor)))
        case _:  # "dynamic" has no effect up to the model's own positions, and no fixed one beyond
            return RopeConfig(theta, None, positions)


def _llama3(config: Fields, rope: Fields, key: str, positions: int) -> Llama3Scaling:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low >= high:
        raise UnsupportedModel(
            f"{config.file}: {key}.low_freq_factor {low:g} is not below high_freq_factor {high:g}"
        )
    return Llama3Scaling(_factor(rope, key, None), low, high, _original_positions(config, rope, positions))


def _yarn(config: Fields, rope: Fields, key: str, positions: int) -> YarnScaling:
    original = _original_positions(config, rope, positions)
    factor = _factor(rope, key, positions / original)
    given = rope.values.get("attention_factor")
    mscale, mscale_all = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    if given is not None:
        attention_factor = rope.number("attention_factor")
    elif mscale and mscale_all:
        attention_factor = _magnitude(factor, mscale) / _magnitude(factor, mscale_all)
    else:
        attention_factor = _magnitude(factor, 1.0)
    return YarnScaling(
        factor=factor,
        original_positions=original,
        fast_rotations=rope.number("beta_fast", 0.0) or 32.0,
        slow_rotations=rope.number("beta_slow", 0.0) or 1.0,
        attention_factor=attention_factor,
        truncate=rope.flag("truncate") is not False,
    )


def _magnitude(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0


def _original_positions(config: Fields, rope: Fields, positions: int) -> int:
    """Some configs have them beside the rotary settings; those go first, as for transformers."""
    outside = config.optional_integer("original_max_position_embeddings")
    return outside if outside is not None else rope.integer("original_max_position_embeddings", positions)


def _factor(rope: Fields, key: str, default: float | None) -> float:
    factor = rope.number("factor", default)
    if factor < 1.0:
        raise UnsupportedModel(f"{rope.file}: {key}.factor is {factor:g}; it must be at least 1")
    return factor
