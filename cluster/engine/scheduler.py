"""What to compute in the next step: one rule, no phases.

Every sequence has tokens to compute; a plan says how many now. Sequences with one token left (decodes) come first,
then the others (prompts, and what comes back after a preemption) share the rest of the token budget in order of
arrival. So a running stream gets a token in every step, however long the prompts beside it, and a prompt gets at
least the budget that decodes leave.

Knows sequences, blocks and plans; knows nothing of results, text, HTTP, Ray or torch.
"""

from collections import deque

from cluster.engine.block_pool import BlockPool
from cluster.engine.config import EngineConfig
from cluster.engine.sequence import Sequence, SequenceState
from cluster.generation import FinishReason
from workers.protocol import KnownSequence, NewSequence, SequenceId, StepPlan


class _Attempt:
    """One plan in the making: what is left of its token budget, and its rows so far."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.new: list[NewSequence] = []
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
        self._count(sequence, num_tokens)

    def _count(self, sequence: Sequence, num_tokens: int) -> None:
        self.budget -= num_tokens
        if sequence.advance(num_tokens):
            self.sampled.append(sequence)


class Scheduler:
    """Invariants: `running` and `waiting` are each in order of arrival, and all of `running` came before all of
    `waiting`. The oldest sequence can always go on: it may take the blocks of every other, and it was accepted
    only because it fits the pool alone. So no set of sequences can lock itself up.
    """

    def __init__(self, config: EngineConfig, pool: BlockPool, incarnation: int) -> None:
        self._config = config
        self._pool = pool
        self._incarnation = incarnation
        self._next_step = 0
        self._ended: list[SequenceId] = []  # the ranks still hold these; the next plan tells them
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.in_flight: deque[tuple[StepPlan, list[Sequence]]] = deque()  # plans, and the rows each one samples
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        """Whether a sequence lives, a result is to come, or the ranks are to be told of an end."""
        return bool(self.running or self.waiting or self.in_flight or self._ended)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a live sequence and free its blocks. Samples still on their way are dropped when they arrive.

        The blocks may be given out at once, even while a plan in flight writes to them: ranks execute in order.
        """
        if sequence.state is SequenceState.RUNNING:
            self.running.remove(sequence)
            self._release(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.become(SequenceState.FINISHED)
        sequence.finish_reason = reason

    def schedule(self) -> StepPlan | None:
        """The next plan, or None when nothing can be planned before a result arrives."""
        attempt = _Attempt(self._config.max_num_batched_tokens)
        prefills = self._plan_decodes(attempt)
        for sequence in prefills:
            if attempt.budget == 0:
                break
            num_tokens = min(sequence.num_tokens_left_to_compute, attempt.budget)
            attempt.take_known(sequence, KnownSequence(sequence.sequence_id, num_tokens))
        self._admit(attempt)
        has_rows = attempt.new or attempt.known
        if not has_rows and (not self._ended or self.in_flight):
            return None
        return self._emit(attempt)

    def heartbeat(self) -> StepPlan:
        """A plan without rows, to learn whether the ranks can run a step."""
        return self._emit(_Attempt(0))

    def _emit(self, attempt: _Attempt) -> StepPlan:
        plan = StepPlan(
            incarnation=self._incarnation,
            step=self._next_step,
            new=tuple(attempt.new),
            known=tuple(attempt.known),
            ended=tuple(self._ended),
        )
        self._ended.clear()
        self._next_step += 1
        self.in_flight.append((plan, attempt.sampled))
        return plan

    def _plan_decodes(self, attempt: _Attempt) -> list[Sequence]:
        """Plan every running sequence with one token left. Returns those with more."""
        prefills: list[Sequence] = []
        index = 0
        while index < len(self.running):  # preemption takes from the end
            sequence = self.running[index]
            index += 1
            if sequence.last_token_is_pending:
                continue
            if sequence.num_tokens_left_to_compute > 1:
                prefills.append(sequence)
            elif sequence.num_computed_tokens < len(sequence.blocks) * self._pool.block_size:
                attempt.take_known(sequence, sequence.decode_row)
            elif self._make_room(sequence):
                new_blocks = self._pool.allocate(1)
                sequence.blocks += new_blocks
                attempt.take_known(sequence, KnownSequence(sequence.sequence_id, 1, tuple(new_blocks)))
        return prefills

    def _make_room(self, sequence: Sequence) -> bool:
        """Free a block for `sequence`, at the cost of later arrivals only.

        The latest of all gives up nothing and waits with its blocks: an older one that needs them takes them.
        """
        while not self._pool.can_allocate(1):
            latest = self.running[-1]
            if latest is sequence:
                return False
            self._preempt(latest)
        return True

    def _admit(self, attempt: _Attempt) -> None:
        """Admit waiting sequences, first come first served, with the blocks for all their known tokens.

        Beyond those, every running sequence keeps one free block to grow into. Without it a newcomer would be
        preempted a few steps later, again and again, and recompute more than it gains. A preempted sequence needs
        at least what it had, of which an older one took some: it comes back only after a running one has ended.
        """
        while self.waiting and attempt.budget > 0 and len(self.running) < self._config.max_num_seqs:
            sequence = self.waiting[0]
            num_blocks = self._pool.blocks_for(len(sequence.token_ids))
            if sequence.num_pending_tokens or not self._pool.can_allocate(num_blocks + len(self.running)):
                return  # a preempted one comes back when the token it still awaits is known
            self.waiting.popleft()
            sequence.become(SequenceState.RUNNING)
            sequence.blocks = self._pool.allocate(num_blocks)
            self.running.append(sequence)
            attempt.take_new(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the front of the queue; it will go on from its own tokens, computed anew."""
        self.running.remove(sequence)
        self._release(sequence)
        sequence.become(SequenceState.WAITING)
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        self._pool.free(sequence.blocks)
        sequence.blocks = []
        sequence.num_computed_tokens = 0
        self._ended.append(sequence.sequence_id)
