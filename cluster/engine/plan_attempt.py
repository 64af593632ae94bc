"""One plan in the making: its budget and its rows.

Counts what it takes; knows nothing of blocks, order or who should come next.
"""

from cluster.engine.sequence import Sequence
from workers.protocol import KnownSequence, NewSequence


class PlanAttempt:
    """What is left of the token budget, and the rows so far."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.new: list[NewSequence] = []
        self.admitted: list[Sequence] = []  # the sequences of `new`
        self.known: list[KnownSequence] = []
        self.sampled: list[Sequence] = []  # the rows whose step will sample a token

    def take_known(self, sequence: Sequence, row: KnownSequence) -> None:
        self.known.append(row)
        self._count(sequence, row.num_new_tokens)

    def take_new(self, sequence: Sequence) -> None:
        num_tokens = min(sequence.num_tokens_left_to_compute, self.budget)
        self.new.append(
            NewSequence(
                sequence_id=sequence.sequence_id,
                token_ids=tuple(sequence.token_ids),
                num_prompt_tokens=sequence.num_prompt_tokens,
                sampling=sequence.sampling,
                blocks=tuple(sequence.blocks),
                num_computed_tokens=sequence.num_computed_tokens,
                num_new_tokens=num_tokens,
            )
        )
        self.admitted.append(sequence)
        self._count(sequence, num_tokens)

    def _count(self, sequence: Sequence, num_tokens: int) -> None:
        self.budget -= num_tokens
        if sequence.advance(num_tokens):
            self.sampled.append(sequence)
