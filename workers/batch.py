"""Packs the scheduled sequences of one step into the flat tensors of a forward pass.

Rows of one sequence lie together; sequences that compute one token come first, longest context first, as attention
wants them. The buffers are made once and overwritten each step, so a batch is valid until the next is packed.

Knows the mirror's sequences, blocks and slots; knows nothing of models, kernels or sampling rules.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from workers.attention.metadata import AttentionMetadata, QueryRange
from workers.config import WorkerConfig
from workers.sequences import LiveSequence, ScheduledSequence


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's input. `scheduled` is in batch order; `sampled_rows` are the last rows of those that sample."""

    scheduled: tuple[ScheduledSequence, ...]
    token_ids: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64
    sampled_rows: Tensor  # [sampling sequences] int64
    attention: AttentionMetadata

    @property
    def sampling(self) -> list[LiveSequence]:
        """The sequences that get a token from this step, in the order of `sampled_rows`."""
        return [entry.sequence for entry in self.scheduled if entry.samples]


class BatchPacker:
    """Owns the input buffers of a rank."""

    def __init__(self, config: WorkerConfig) -> None:
        self._block_size = config.block_size
        self._token_ids = np.empty(config.max_num_batched_tokens, dtype=np.int64)
        self._positions = np.empty_like(self._token_ids)
        self._slots = np.empty_like(self._token_ids)

    def pack(self, scheduled: Sequence[ScheduledSequence]) -> Batch:
        """Lay out a step of at least one sequence. The order of `scheduled` does not change any row's values."""
        ordered = sorted(scheduled, key=lambda entry: (entry.num_new > 1, -entry.end))
        num_decodes = sum(entry.num_new == 1 for entry in ordered)
        tables = self._block_tables(ordered)
        self._fill_decodes(ordered[:num_decodes])
        queries = [QueryRange(row, 1, entry.end) for row, entry in enumerate(ordered[:num_decodes])]
        row = num_decodes
        for entry, table in zip(ordered[num_decodes:], tables[num_decodes:], strict=True):
            self._fill_prompt(row, entry, table)
            queries.append(QueryRange(row, entry.num_new, entry.end))
            row += entry.num_new
        sampled_rows = [
            query.first + query.count - 1 for query, entry in zip(queries, ordered, strict=True) if entry.samples
        ]
        return Batch(
            tuple(ordered),
            torch.from_numpy(self._token_ids[:row]),
            torch.from_numpy(self._positions[:row]),
            torch.tensor(sampled_rows, dtype=torch.int64),
            AttentionMetadata(torch.from_numpy(self._slots[:row]), tuple(queries), num_decodes, tables),
        )

    def _fill_decodes(self, entries: Sequence[ScheduledSequence]) -> None:
        """One token a sequence: the last that the mirror knows, or the one that recomputation has reached."""
        count, size = len(entries), self._block_size
        self._token_ids[:count] = [entry.sequence.token_ids[entry.start] for entry in entries]
        self._positions[:count] = [entry.start for entry in entries]
        self._slots[:count] = [
            entry.sequence.blocks[entry.start // size] * size + entry.start % size for entry in entries
        ]

    def _fill_prompt(self, row: int, entry: ScheduledSequence, table: npt.NDArray[np.int64]) -> None:
        rows = slice(row, row + entry.num_new)
        positions = np.arange(entry.start, entry.end)
        self._token_ids[rows] = entry.sequence.token_ids[entry.start : entry.end]
        self._positions[rows] = positions
        self._slots[rows] = table[positions // self._block_size] * self._block_size + positions % self._block_size

    def _block_tables(self, entries: Sequence[ScheduledSequence]) -> npt.NDArray[np.int64]:
        """[sequences, blocks] of what is computed after this step; short rows go on with their first block."""
        counts = [-(-entry.end // self._block_size) for entry in entries]
        tables = np.empty((len(entries), max(counts)), dtype=np.int64)
        for table, entry, count in zip(tables, entries, counts, strict=True):
            blocks = entry.sequence.blocks
            table[:count] = blocks[:count]
            table[count:] = blocks[0]
        return tables
