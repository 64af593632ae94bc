"""Which class runs which architecture. Knows classes and specs; knows nothing of files."""

from model_shards.families.decoder import Decoder
from model_shards.layers.placement import Placement
from model_shards.spec import ModelSpec


def build_model(spec: ModelSpec, placement: Placement) -> Decoder:
    """One rank's shard, its parameters still without memory."""
    match spec.architecture:
        case "llama" | "mistral" | "qwen2" | "qwen3":
            return Decoder(spec, placement)
