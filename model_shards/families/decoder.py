"""The decoder that serves the Llama, Mistral and Qwen families: one rank's shard of it, by the flags of its spec.

Two all-reduces a layer and one for the embedding. Knows tokens and positions; knows nothing of files, sequences or
KV blocks.
"""

from torch import Tensor, nn

from model_shards.families.decoder_layout import decoder_layout
from model_shards.layers.attention import Attention
from model_shards.layers.decoder_layer import DecoderLayer, run_layers
from model_shards.layers.experts import MixtureOfExperts
from model_shards.layers.linear import Linear
from model_shards.layers.mlp import GatedMlp
from model_shards.layers.norm import RmsNorm
from model_shards.layers.placement import Placement
from model_shards.layers.rotary import RotaryTable
from model_shards.layers.vocab import VocabParallelEmbedding
from model_shards.model import AttentionContext
from model_shards.partition import ModelLayout, ModelPartition, partition_model
from model_shards.spec import ModelSpec


class Decoder(nn.Module):
    """A `ShardedModel`. Its parameters have no memory until a loader fills them and calls `prepare`.

    Invariant: `layout` names exactly the parameters of the module, with their shapes on this rank.
    """

    layout: ModelLayout

    def __init__(self, spec: ModelSpec, placement: Placement) -> None:
        super().__init__()
        rank = placement.group.rank
        partition = partition_model(spec, placement.group.size, placement.shard_weights)
        vocabulary = partition.vocabulary[rank]
        self.num_layers = spec.num_layers
        self.num_local_query_heads = partition.query_heads[rank].size
        self.num_local_kv_heads = partition.kv_heads[rank].size
        self.head_dim = spec.head_dim
        self.vocab_size = spec.vocab_size
        self.local_vocab_start = vocabulary.start
        self.local_vocab_size = vocabulary.size
        self.has_static_shapes = spec.num_experts == 0  # tokens choose their experts, and these their rows
        self.layout = decoder_layout(spec, partition)

        self.embedding = VocabParallelEmbedding(vocabulary, spec.hidden_size, placement)
        self.layers = nn.ModuleList(_layer(spec, index, partition, placement) for index in range(spec.num_layers))
        self.norm = RmsNorm(spec.hidden_size, spec.norm_epsilon, placement.dtype)
        self.head = Linear(vocabulary.size, spec.hidden_size, placement)
        self._tied = spec.tied_embeddings
        self._tie()
        assert spec.rope_theta is not None, "families with learned positions have a class of their own"
        self._rotary = RotaryTable(
            spec.head_dim,
            spec.max_positions,
            spec.rope_theta,
            spec.rope_scaling,
            dtype=placement.dtype,
            device=placement.device,
        )

    def prepare(self) -> None:
        """Make what is not ready yet ready to be multiplied with. Called when all parameters are filled.

        A tied head is packed from the embedding's rows, which stay as they are: SmolLM2 pays 113 MB over all ranks
        and gains 6 ms a step with one row.
        """
        self._tie()
        for module in self.modules():
            if isinstance(module, Linear):
                module.prepare()

    def forward(
        self,
        token_ids: Tensor,  # [tokens] int64
        positions: Tensor,  # [tokens] int64
        attention: AttentionContext,
    ) -> Tensor:  # [tokens, hidden]
        """Final hidden states, after the last norm; equal on every rank."""
        hidden = self.embedding(token_ids)
        return run_layers(self.layers, self.norm, hidden, self._rotary.at(positions), attention)

    def local_logits(
        self,
        hidden: Tensor,  # [rows, hidden]
    ) -> Tensor:  # [rows, local_vocab_size] float32
        """Logits of the vocabulary ids [local_vocab_start, local_vocab_start + local_vocab_size)."""
        logits: Tensor = self.head(hidden)
        return logits.float()

    def _tie(self) -> None:
        if self._tied:
            self.head.weight = self.embedding.weight


def _layer(spec: ModelSpec, index: int, partition: ModelPartition, placement: Placement) -> DecoderLayer:
    rank = placement.group.rank
    query_heads, kv_heads = partition.query_heads[rank].size, partition.kv_heads[rank].size
    feed_forward = MixtureOfExperts if spec.num_experts else GatedMlp
    return DecoderLayer(
        RmsNorm(spec.hidden_size, spec.norm_epsilon, placement.dtype),
        Attention(spec, index, query_heads, kv_heads, placement),
        RmsNorm(spec.hidden_size, spec.norm_epsilon, placement.dtype),
        feed_forward(spec, partition.ffn_columns[rank].size, placement),
    )
