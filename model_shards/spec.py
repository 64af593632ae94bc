"""What a model is, in numbers and flags: everything that construction, cutting and planning need of a config.

One decoder serves several families, so a family is a set of flags here, not a class; GPT-2 alone has its own.
Knows nothing of files (see `weights.metadata`), ranks or torch.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from model_shards.errors import UnsupportedModel
from model_shards.rope import RopeScaling

Architecture = Literal["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gpt2"]
ARCHITECTURES: tuple[Architecture, ...] = get_args(Architecture)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only model whose every setting we run.

    Invariant: the head counts divide and all sizes are positive; construction raises `UnsupportedModel` otherwise.
    """

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int  # of the feed-forward layer, or of each expert
    max_positions: int
    norm_epsilon: float
    rope_theta: float | None  # None: positions are learned
    tied_embeddings: bool
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    output_bias: bool = False  # of the attention's output projection
    mlp_bias: bool = False
    query_key_norm: bool = False  # an RMS norm over each head before the rotation
    num_experts: int = 0  # in every layer, instead of one feed-forward layer
    experts_per_token: int = 0
    normalised_routing: bool = False  # the weights of a token's experts add up to one
    windows: tuple[int | None, ...] = ()  # how many keys a token of each layer sees; empty: no layer has a window
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "num_layers",
            "num_query_heads",
            "num_kv_heads",
            "head_dim",
            "intermediate_size",
            "max_positions",
        ):
            if getattr(self, name) < 1:
                raise UnsupportedModel(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.num_query_heads % self.num_kv_heads:
            raise UnsupportedModel(
                f"{self.num_query_heads} query heads do not divide over {self.num_kv_heads} KV heads"
            )
        if self.rope_theta is not None and self.head_dim % 2:
            raise UnsupportedModel(f"head_dim is {self.head_dim}; rotary embedding needs an even one")
        if self.num_experts < 0 or not min(self.num_experts, 1) <= self.experts_per_token <= self.num_experts:
            raise UnsupportedModel(f"{self.experts_per_token} of {self.num_experts} experts for each token")
        if self.windows and len(self.windows) != self.num_layers:
            raise UnsupportedModel(f"{len(self.windows)} attention windows for {self.num_layers} layers")
        for window in self.windows:
            if window is not None and window < 1:
                raise UnsupportedModel(f"the attention window is {window}; it must be at least 1")

    @property
    def matrices_per_ffn_column(self) -> int:
        """In how many matrices of a layer, over all experts, an FFN column has hidden_size weights."""
        return 2 if self.architecture == "gpt2" else 3 * max(self.num_experts, 1)

    def window_of(self, layer: int) -> int | None:
        """How many keys a token sees in `layer`, its own among them; None: all."""
        return self.windows[layer] if self.windows else None
