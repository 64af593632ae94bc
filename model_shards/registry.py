"""Which class runs which architecture. Knows classes and specs; knows nothing of files."""

from typing import assert_never

from model_shards.families.decoder import Decoder
from model_shards.families.gpt2 import Gpt2
from model_shards.layers.placement import Placement
from model_shards.spec import ModelSpec

Model = Decoder | Gpt2


def build_model(spec: ModelSpec, placement: Placement) -> Model:
    """One rank's shard, its parameters still without memory."""
    match spec.architecture:
        case "llama" | "mistral" | "qwen2" | "qwen3" | "qwen3_moe" | "mixtral":
            return Decoder(spec, placement)
        case "gpt2":
            return Gpt2(spec, placement)
        case _:
            assert_never(spec.architecture)
