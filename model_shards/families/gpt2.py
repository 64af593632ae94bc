"""GPT-2: one rank's shard of it. Learned positions, layer norms with biases, an ungated feed-forward layer.

Two all-reduces a layer and one for the embedding. Knows tokens and positions; knows nothing of files, sequences or
KV blocks.
"""

from torch import Tensor, nn

from model_shards.families.gpt2_layout import gpt2_layout
from model_shards.layers.attention import Attention
from model_shards.layers.decoder_layer import DecoderLayer, run_layers
from model_shards.layers.linear import Linear
from model_shards.layers.mlp import GeluMlp
from model_shards.layers.norm import LayerNorm
from model_shards.layers.placement import Placement
from model_shards.layers.vocab import LearnedPositions, VocabParallelEmbedding
from model_shards.model import AttentionContext
from model_shards.partition import ModelLayout, ModelPartition, partition_model
from model_shards.spec import ModelSpec


class Gpt2(nn.Module):
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
        self.has_static_shapes = True
        self.layout = gpt2_layout(spec, partition)

        self.embedding = VocabParallelEmbedding(vocabulary, spec.hidden_size, placement)
        self.positions = LearnedPositions(spec.max_positions, spec.hidden_size, placement)
        self.layers = nn.ModuleList(_layer(spec, index, partition, placement) for index in range(spec.num_layers))
        self.norm = LayerNorm(spec.hidden_size, spec.norm_epsilon, placement.dtype)
        self.head = Linear(vocabulary.size, spec.hidden_size, placement)
        self._tied = spec.tied_embeddings
        self._tie()

    def prepare(self) -> None:
        """Make what is not ready yet ready to be multiplied with. Called when all parameters are filled."""
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
        hidden = self.embedding(token_ids) + self.positions(positions)
        return run_layers(self.layers, self.norm, hidden, None, attention)

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
    return DecoderLayer(
        LayerNorm(spec.hidden_size, spec.norm_epsilon, placement.dtype),
        Attention(spec, index, query_heads, kv_heads, placement),
        LayerNorm(spec.hidden_size, spec.norm_epsilon, placement.dtype),
        GeluMlp(spec, partition.ffn_columns[rank].size, placement),
    )
