"""The lower end of a model: the embedding, cut over the vocabulary, and learned positions.

Ranks hold contiguous ranges of ids in rank order, possibly uneven. Knows ids; knows nothing of sampling.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from model_shards.layers.linear import empty_parameter
from model_shards.layers.placement import Placement
from model_shards.partition import Span


class VocabParallelEmbedding(nn.Module):
    """Rows of this rank's ids, zeros for all others, summed over the ranks."""

    weight: nn.Parameter

    def __init__(self, vocabulary: Span, hidden_size: int, placement: Placement) -> None:
        super().__init__()
        self.weight = empty_parameter(vocabulary.size, hidden_size, dtype=placement.dtype)
        self._vocabulary = vocabulary
        self._group = placement.group

    def forward(
        self,
        token_ids: Tensor,  # [tokens] int64
    ) -> Tensor:  # [tokens, hidden], equal on every rank
        if self._group.size == 1:
            return F.embedding(token_ids, self.weight)
        local = token_ids - self._vocabulary.start
        elsewhere = (local < 0) | (local >= self._vocabulary.size)
        rows = F.embedding(local.masked_fill_(elsewhere, 0), self.weight)
        return self._group.all_reduce(rows.masked_fill_(elsewhere.unsqueeze(1), 0.0))


class LearnedPositions(nn.Module):
    """A row for each position, the same on every rank."""

    weight: nn.Parameter

    def __init__(self, max_positions: int, hidden_size: int, placement: Placement) -> None:
        super().__init__()
        self.weight = empty_parameter(max_positions, hidden_size, dtype=placement.dtype)

    def forward(
        self,
        positions: Tensor,  # [tokens] int64
    ) -> Tensor:  # [tokens, hidden]
        return F.embedding(positions, self.weight)
