"""From the ranks' logits of the sampling rows to one token id a row, the same on every rank.

Plain greedy rows exchange one (value, id) pair a rank and every rank decides alike; for all others rank 0 chooses
from the gathered logits and broadcasts. A row's token depends on its logits, settings and the tokens before it
only, never on the rest of the batch.

Knows logits, settings and the group; knows nothing of sequences, blocks or models.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model_shards.group import TensorParallelGroup
from workers.protocol import SamplingSettings
from workers.sampling.adjustments import adjust
from workers.sampling.distribution import FloatRow, draw
from workers.sampling.logprobs import TokenScore, score
from workers.sampling.randomness import uniform
from workers.sampling.shards import VocabularyShards
from workers.staging import Readback


@dataclass(frozen=True, slots=True)
class Draw:
    """What is asked for one row: the settings, and which position of its sequence the new token takes."""

    settings: SamplingSettings
    position: int
    token_ids: Sequence[int] = ()  # all before that position; looked at for adjustments only
    num_prompt_tokens: int = 0

    @property
    def greedy(self) -> bool:
        return self.settings.temperature == 0

    @property
    def plain_greedy(self) -> bool:
        """Whether the greatest logit is all that has to be known of the row."""
        return self.greedy and self.settings.adjustments is None and self.settings.logprobs is None


@dataclass(frozen=True, slots=True)
class Samples:
    """One token id a row, on every rank; on rank 0 the scores of the rows that ask for log-probabilities."""

    token_ids: list[int]
    scores: dict[int, TokenScore]  # by row


@dataclass(frozen=True, slots=True)
class Question:
    """A token that is known, whose log-probability is asked for."""

    token_id: int
    num_top: int


class Sampler:
    """One for each rank of a group."""

    def __init__(
        self,
        group: TensorParallelGroup,
        readback: Readback,
        *,
        vocab_size: int,
        local_start: int,
        local_size: int,
    ) -> None:
        """A collective: every rank makes its sampler at once. Raises `WorkerError` on gaps or overlaps."""
        self._group = group
        self._readback = readback
        self._shards = VocabularyShards(
            group, readback, vocab_size=vocab_size, local_start=local_start, local_size=local_size
        )

    def sample(
        self,
        logits: Tensor,  # [rows, local vocabulary] float32
        draws: Sequence[Draw],
    ) -> Samples:
        """Choose a token for each row. A collective, unless there are no rows."""
        plain = [row for row, item in enumerate(draws) if item.plain_greedy]
        others = [row for row, item in enumerate(draws) if not item.plain_greedy]
        samples = Samples([0] * len(draws), {})
        if plain:
            for row, token_id in zip(plain, self._shards.greatest(_rows(logits, plain)), strict=True):
                samples.token_ids[row] = token_id
        if others:
            self._choose(logits, draws, others, samples)
        return samples

    def score(
        self,
        logits: Tensor,  # [rows, local vocabulary] float32
        questions: Sequence[Question],
    ) -> list[TokenScore]:
        """How likely one known token a row was; on rank 0, nothing elsewhere. A collective."""
        rows = self._shards.gather(logits)
        if self._group.rank != 0:
            return []
        return [score(row, item.token_id, item.num_top) for row, item in zip(rows, questions, strict=True)]

    def _choose(self, logits: Tensor, draws: Sequence[Draw], chosen: list[int], samples: Samples) -> None:
        """Let rank 0 decide the rows `chosen`, and write them to `samples`."""
        whole_rows = self._shards.gather(_rows(logits, chosen))
        token_ids = torch.zeros(len(chosen), dtype=torch.int64)
        if self._group.rank == 0:
            for place, (row, whole) in enumerate(zip(chosen, whole_rows, strict=True)):
                token_ids[place] = token_id = _choose_token(whole, draws[row])
                if (num_top := draws[row].settings.logprobs) is not None:
                    samples.scores[row] = score(whole, token_id, num_top)
        agreed = self._readback.fetch(self._group.broadcast(token_ids.to(self._readback.device)))
        for row, token_id in zip(chosen, agreed.tolist(), strict=True):
            samples.token_ids[row] = token_id


def _choose_token(logits: FloatRow, item: Draw) -> int:
    settings = item.settings
    if settings.adjustments is not None:
        logits = adjust(logits, settings.adjustments, item.token_ids, item.num_prompt_tokens)
    if item.greedy:
        return int(logits.argmax())  # the lowest id among equals
    return draw(
        logits,
        uniform(settings.seed, settings.choice, item.position),
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        min_p=settings.min_p,
    )


def _rows(logits: Tensor, rows: list[int]) -> Tensor:
    return logits if len(rows) == len(logits) else logits[rows]
