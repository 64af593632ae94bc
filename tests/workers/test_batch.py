"""Packing: every row of the flat batch, by hand."""

from array import array

import torch

from tests.workers.plans import GREEDY, worker_config
from workers.batch import BatchPacker
from workers.protocol import SequenceId
from workers.sequences import LiveSequence, ScheduledSequence


def live(number: int, num_tokens: int, num_computed: int, blocks: list[int]) -> LiveSequence:
    token_ids = array("q", range(100 * number, 100 * number + num_tokens))
    return LiveSequence(SequenceId(number), token_ids, num_tokens, GREEDY, blocks, num_computed)


def test_rows_of_a_mixed_step() -> None:
    packer = BatchPacker(worker_config(block_size=4))
    short_decode = ScheduledSequence(live(1, 4, 3, [9]), 3, 1)
    chunk = ScheduledSequence(live(2, 9, 3, [5, 2, 7]), 3, 3)
    long_decode = ScheduledSequence(live(3, 6, 5, [0, 8, 6]), 5, 1)
    prompt = ScheduledSequence(live(4, 2, 0, [3]), 0, 2)
    batch = packer.pack([chunk, short_decode, prompt, long_decode])

    assert [entry.sequence.sequence_id for entry in batch.scheduled] == [3, 1, 2, 4]
    assert batch.token_ids.tolist() == [305, 103, 203, 204, 205, 400, 401]
    assert batch.positions.tolist() == [5, 3, 3, 4, 5, 0, 1]
    assert batch.sampled_rows.tolist() == [0, 1, 6]
    assert [sequence.sequence_id for sequence in batch.sampling] == [3, 1, 4]
    assert batch.attention.slots.tolist() == [8 * 4 + 1, 9 * 4 + 3, 5 * 4 + 3, 2 * 4, 2 * 4 + 1, 12, 13]
    assert batch.attention.num_decodes == 2
    assert [(query.first, query.count, query.context) for query in batch.attention.queries] == [
        (0, 1, 6),
        (1, 1, 4),
        (2, 3, 6),
        (5, 2, 2),
    ]
    # Blocks beyond what is computed after the step are left out; short rows go on with their first block.
    assert batch.attention.block_tables.tolist() == [[0, 8], [9, 9], [5, 2], [3, 3]]


def test_a_recomputed_token_is_not_the_last_one() -> None:
    packer = BatchPacker(worker_config(block_size=4))
    batch = packer.pack([ScheduledSequence(live(1, 6, 2, [1]), 2, 1)])
    assert batch.token_ids.tolist() == [102]
    assert batch.sampled_rows.tolist() == []
    assert batch.sampled_rows.dtype == torch.int64
