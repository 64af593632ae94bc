"""The mixture of experts of a `config.json`: how many, how wide, how they are chosen. Torch-free.

What is absent is what `transformers` takes it for.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from model_shards.spec import Architecture
from model_shards.weights.fields import Fields

# Settings of these families that change the arithmetic, each with the only values that we run.
MIXTURE_ONLY_VALUES: Mapping[str, tuple[object, ...]] = {
    "decoder_sparse_step": (None, 1),  # experts in every layer
    "mlp_only_layers": (None, []),
}
# Of the others, which have none.
DENSE_ONLY_VALUES: Mapping[str, tuple[object, ...]] = {
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
}


@dataclass(frozen=True, slots=True)
class FeedForwardConfig:
    """Without experts, one feed-forward layer of `intermediate_size`; else each expert is that wide."""

    intermediate_size: int
    num_experts: int = 0
    experts_per_token: int = 0
    normalised_routing: bool = False


def read_feed_forward(config: Fields, architecture: Architecture) -> FeedForwardConfig:
    match architecture:
        case "mixtral":
            return FeedForwardConfig(
                config.integer("intermediate_size"),
                config.integer("num_local_experts", 8),
                config.integer("num_experts_per_tok", 2),
                normalised_routing=True,
            )
        case "qwen3_moe":
            return FeedForwardConfig(
                config.integer("moe_intermediate_size", 768),
                config.integer("num_experts", config.integer("num_local_experts", 128)),
                config.integer("num_experts_per_tok", 8),
                normalised_routing=bool(config.flag("norm_topk_prob")),
            )
        case _:
            return FeedForwardConfig(config.integer("intermediate_size"))
