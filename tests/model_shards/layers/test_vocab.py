"""An embedding cut over ranks gives every rank the whole rows."""

import torch
from torch import Tensor, nn

from model_shards.layers.placement import Placement
from model_shards.layers.vocab import VocabParallelEmbedding
from model_shards.partition import Span
from tests.fakes.thread_group import ThreadGroup, run_ranks


def test_every_rank_gets_every_row() -> None:
    table = torch.randn(11, 4, generator=torch.Generator().manual_seed(0))
    spans = [Span(0, 4), Span(4, 5), Span(5, 11)]
    ids = torch.tensor([0, 3, 4, 5, 10, 4, 0])

    def work(group: ThreadGroup) -> Tensor:
        span = spans[group.rank]
        layer = VocabParallelEmbedding(span, 4, Placement(group, torch.device("cpu"), torch.float32))
        layer.weight = nn.Parameter(table[span.start : span.stop].clone(), requires_grad=False)
        rows: Tensor = layer(ids)
        return rows

    before = ids.clone()
    for rows in run_ranks(3, work):
        assert torch.equal(rows, table[ids])
    assert torch.equal(ids, before)
