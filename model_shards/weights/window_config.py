"""The sliding windows of a `config.json`: which layers have one, and how wide. Torch-free.

Families spell it differently and have defaults of their own; what is absent here is what `transformers` takes it
for. A window that is no narrower than the model's positions is none.
"""

from model_shards.errors import UnsupportedModel
from model_shards.spec import Architecture
from model_shards.weights.fields import Fields

_DEFAULT_WINDOW = 4096
_DEFAULT_FIRST_WINDOWED_LAYER = 28
_FULL, _SLIDING = "full_attention", "sliding_attention"


def read_windows(config: Fields, architecture: Architecture, max_positions: int) -> tuple[int | None, ...]:
    """One entry a layer, or none at all where no layer has a window. Raises `UnsupportedModel`."""
    num_layers = config.integer("num_hidden_layers")
    match architecture:
        case "mistral" | "mixtral":
            _refuse_layer_types(config, architecture)
            window = config.optional_integer("sliding_window")
            if architecture == "mistral" and "sliding_window" not in config.values:
                window = _DEFAULT_WINDOW
            sliding = [True] * num_layers
        case "qwen3_moe":
            _refuse_layer_types(config, architecture)
            window = config.integer("sliding_window", _DEFAULT_WINDOW) if _is_used(config) else None
            sliding = [True] * num_layers
        case "qwen2" | "qwen3":
            window = config.integer("sliding_window", _DEFAULT_WINDOW) if _is_used(config) else None
            sliding = _sliding_layers(config, num_layers)
        case _:
            _refuse_layer_types(config, architecture)
            if _is_used(config):
                raise UnsupportedModel(f"{config.file}: use_sliding_window is not supported for {architecture}")
            return ()
    if window is None or window >= max_positions or not any(sliding):
        return ()
    return tuple(window if is_sliding else None for is_sliding in sliding)


def _is_used(config: Fields) -> bool:
    return bool(config.flag("use_sliding_window"))


def _sliding_layers(config: Fields, num_layers: int) -> list[bool]:
    """By `layer_types`, or every layer from `max_window_layers` on."""
    kinds = config.values.get("layer_types")
    if kinds is None:
        first = config.integer("max_window_layers", _DEFAULT_FIRST_WINDOWED_LAYER)
        return [layer >= first for layer in range(num_layers)]
    if not isinstance(kinds, list) or any(kind not in (_FULL, _SLIDING) for kind in kinds):
        raise UnsupportedModel(f"{config.file}: layer_types = {kinds!r} is not supported")
    if len(kinds) != num_layers:
        raise UnsupportedModel(f"{config.file}: {len(kinds)} layer_types for {num_layers} layers")
    if _SLIDING in kinds and not _is_used(config):
        raise UnsupportedModel(f"{config.file}: layer_types with {_SLIDING}, but use_sliding_window is not set")
    return [kind == _SLIDING for kind in kinds]


def _refuse_layer_types(config: Fields, architecture: Architecture) -> None:
    kinds = config.values.get("layer_types") or []
    if any(kind != _FULL for kind in kinds):
        raise UnsupportedModel(
            f"{config.file}: layer_types other than {_FULL} are not supported for {architecture}"
        )
