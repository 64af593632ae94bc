"""Which request may be what kills the ranks: found without harm to the others, and taken out.

A sequence is struck when the ranks did not survive a step that computed what no step had computed of it before;
its next token clears it, and so does a death elsewhere in its text. Once somebody has two strikes, at most one
sequence at a time is replayed that has gained no token since, so that the next strikes meet the one that deserves
them. Two more and it has to go: ranks that somebody else kills would have to die twice in the few steps in which
just this one was on its way.

Knows sequences and plans; knows nothing of ranks or clients.
"""

from collections import Counter
from collections.abc import Iterable

from cluster.engine.sequence import Sequence, SequenceState
from workers.protocol import SequenceId, StepPlan

ALONE_FROM = 2  # strikes
OUT_FROM = 4


class Suspects:
    """Belongs to the scheduler, which asks before it starts a sequence."""

    def __init__(self) -> None:
        self._doubted: list[Sequence] = []

    def strike(self, in_flight: Iterable[StepPlan], running: Iterable[Sequence]) -> None:
        """The ranks failed with these plans in flight: in the first, since they would have sent its result."""
        dying, *later = [_tokens_in(plan) for plan in in_flight] or [Counter()]
        for sequence in running:
            num_tokens = dying[sequence.sequence_id]
            if num_tokens:
                self._strike(sequence, num_tokens, sum(plan[sequence.sequence_id] for plan in later))

    def may_start(self, running: Iterable[Sequence]) -> bool:
        """Whether one more sequence may start beside those that run."""
        if self._doubted:
            self._doubted = [sequence for sequence in self._doubted if _is_doubted(sequence)]
        return not self._doubted or all(sequence.has_gained for sequence in running)

    def found(self) -> list[Sequence]:
        """Those that have to go."""
        return [
            sequence for sequence in self._doubted if sequence.num_strikes >= OUT_FROM and _is_doubted(sequence)
        ]

    def _strike(self, sequence: Sequence, num_tokens: int, num_later: int) -> None:
        """So many of its tokens were on their way. Those that an earlier step has computed kill nobody."""
        end = sequence.num_computed_tokens - num_later
        start = end - num_tokens
        if sequence.has_output:
            start = max(start, len(sequence.token_ids) - 1)
        if start >= end:
            return
        suspected = range(max(start, sequence.suspected.start), min(end, sequence.suspected.stop))
        if sequence.num_strikes == 0 or not suspected:
            sequence.num_strikes, suspected = 0, range(start, end)
        sequence.suspected = suspected
        sequence.num_strikes += 1
        if sequence.num_strikes == ALONE_FROM:
            self._doubted.append(sequence)


def _tokens_in(plan: StepPlan) -> Counter[SequenceId]:
    tokens = Counter({new.sequence_id: new.num_new_tokens for new in plan.new})
    tokens.update({known.sequence_id: known.num_new_tokens for known in plan.known})
    return tokens


def _is_doubted(sequence: Sequence) -> bool:
    return sequence.num_strikes >= ALONE_FROM and sequence.state is not SequenceState.FINISHED
