"""What to compute in the next step: one rule, no phases.

Every sequence has tokens to compute; a plan says how many now. Sequences with one token left (decodes) come first,
then the others (prompts, and what comes back after a preemption) share the rest of the token budget in order: by
priority, lower numbers first, and within a priority by arrival. So a running stream gets a token in every step,
however long the prompts beside it, and the first prompt gets at least the budget that decodes leave.

Knows sequences, blocks and plans; knows nothing of results, text, HTTP, Ray or torch.
"""

from bisect import bisect_left, insort
from collections import deque
from operator import attrgetter

from cluster.engine.block_pool import BlockPool
from cluster.engine.config import EngineConfig
from cluster.engine.plan_attempt import PlanAttempt
from cluster.engine.prefix_cache import PrefixCache
from cluster.engine.sequence import Sequence, SequenceState
from cluster.engine.suspects import Suspects
from cluster.generation import FinishReason
from workers.protocol import KnownSequence, SequenceId, StepPlan

_order = attrgetter("order")


class Scheduler:
    """Invariants: `running` and `waiting` are each in order, and within a priority all of `running` came before
    all of `waiting`. The first of all sequences in order, the oldest of the highest priority, can always go on: it
    may take the seat and the blocks of every other, and it was accepted only because it fits the pool alone. So
    no set of sequences can lock itself up.
    """

    def __init__(self, config: EngineConfig, pool: BlockPool, incarnation: int) -> None:
        self._config = config
        self._pool = pool
        self._incarnation = incarnation
        self._next_step = 0
        self._ended: list[SequenceId] = []  # the ranks still hold these; the next plan tells them
        self.prefix_cache = PrefixCache(pool, config.prefix_cache)
        self.suspects = Suspects()
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.admitted: list[Sequence] = []  # by the last plan
        self.in_flight: deque[tuple[StepPlan, list[Sequence]]] = deque()  # plans, and the rows each one samples
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        """Whether a sequence lives, a result is to come, or the ranks are to be told of an end."""
        return bool(self.running or self.waiting or self.in_flight or self._ended)

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=_order)

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

    def forget_ranks(self) -> None:
        """The ranks are lost, and with them all KV and whatever was in flight: every live sequence waits, in order
        of arrival, to go on from its confirmed tokens. Nothing can be planned before `begin`.
        """
        self.suspects.strike((plan for plan, _ in self.in_flight), self.running)
        while self.running:
            self._put_back(self.running[-1])
        for sequence in self.waiting:
            sequence.num_pending_tokens = 0
        self.in_flight.clear()
        self._ended.clear()
        self._pool.reset()

    def begin(self, incarnation: int) -> None:
        """Plan for ranks that hold nothing yet."""
        self._incarnation = incarnation
        self._next_step = 0

    def schedule(self) -> StepPlan | None:
        """The next plan, or None when nothing can be planned before a result arrives."""
        attempt = PlanAttempt(self._config.max_num_batched_tokens)
        self._make_way()
        self._plan_prompts(attempt, self._plan_decodes(attempt))
        has_rows = attempt.new or attempt.known
        if not has_rows and (not self._ended or self.in_flight):
            return None
        return self._emit(attempt)

    def heartbeat(self) -> StepPlan:
        """A plan without rows, to learn whether the ranks can run a step."""
        return self._emit(PlanAttempt(0))

    def _emit(self, attempt: PlanAttempt) -> StepPlan:
        plan = StepPlan(
            incarnation=self._incarnation,
            step=self._next_step,
            new=tuple(attempt.new),
            known=tuple(attempt.known),
            ended=tuple(self._ended),
        )
        self._ended.clear()
        self.prefix_cache.end_plan()
        self.admitted = attempt.admitted
        self._next_step += 1
        self.in_flight.append((plan, attempt.sampled))
        return plan

    def _make_way(self) -> None:
        """Preempt sequences of lower priority until the first in the queue can start in this step.

        Not when it could not even without them: then it waits for those ahead of it, and the others may go on.
        """
        if not self.waiting or not self.running:
            return
        first = self.waiting[0]
        if first.priority >= self.running[-1].priority or first.num_pending_tokens:
            return
        num_ahead = self._num_ahead(first)
        held_ahead = sum(len(sequence.blocks) for sequence in self.running[:num_ahead])
        needed = self._pool.blocks_for(len(first.token_ids)) + 2 * num_ahead
        if held_ahead + needed > self._pool.num_blocks:
            return
        found = self.prefix_cache.find(first)
        while self.running and self.running[-1].priority > first.priority:
            growth = len(self.running)  # what the decodes of this step may take before it starts
            if self._fits(first, found, growth):
                return
            self._preempt(self.running[-1])

    def _plan_decodes(self, attempt: PlanAttempt) -> list[Sequence]:
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
                self.prefix_cache.keep(sequence)
                new_blocks = self._pool.allocate(1)
                sequence.blocks += new_blocks
                attempt.take_known(sequence, KnownSequence(sequence.sequence_id, 1, tuple(new_blocks)))
        return prefills

    def _make_room(self, sequence: Sequence) -> bool:
        """Free a block for `sequence`, at the cost of those behind it only, the last first.

        The last of all gives up nothing and waits with its blocks: an older one that needs them takes them.
        """
        while not self._pool.can_allocate(1):
            latest = self.running[-1]
            if latest is sequence:
                return False
            self._preempt(latest)
        return True

    def _plan_prompts(self, attempt: PlanAttempt, prefills: list[Sequence]) -> None:
        """Share what decodes have left among those that have started and those that wait, in order."""
        for sequence in prefills:
            self._admit(attempt, sequence)
            if attempt.budget == 0:
                return
            num_tokens = min(sequence.num_tokens_left_to_compute, attempt.budget)
            attempt.take_known(sequence, KnownSequence(sequence.sequence_id, num_tokens))
            self.prefix_cache.keep_after_plan(sequence)
        self._admit(attempt, None)

    def _admit(self, attempt: PlanAttempt, ahead_of: Sequence | None) -> None:
        """Start waiting sequences in order, up to a running one, with the blocks for all their known tokens.

        One whose next block is computed by this very plan waits a step and then reads it.
        """
        while self.waiting and attempt.budget > 0:
            sequence = self.waiting[0]
            if sequence.num_pending_tokens or (ahead_of is not None and sequence.order > ahead_of.order):
                return  # a preempted one comes back when the token it still awaits is known
            if not self.suspects.may_start(self.running):
                return
            found = self.prefix_cache.find(sequence)
            if not self._fits(sequence, found) or self.prefix_cache.is_coming(sequence, len(found)):
                return
            self._start(sequence, found)
            attempt.take_new(sequence)
            self.prefix_cache.keep_after_plan(sequence)

    def _fits(self, sequence: Sequence, found: list[int], growth: int = 0) -> bool:
        """Whether there is a seat, and blocks for all its tokens beyond those `found` that others hold anyway.

        Beyond these, every running sequence ahead of it keeps one free block to grow into. Without it a newcomer
        would be preempted a few steps later, again and again, and recompute more than it gains. A preempted
        sequence needs at least what it had, of which one ahead took some: it comes back after a running one has
        ended, or when it can share more than before. So between a return and the next preemption those ahead have
        grown by a block each, or one of higher priority has arrived: preemptions are bounded by progress.
        """
        if len(self.running) >= self._config.max_num_seqs:
            return False
        num_blocks = self._pool.blocks_for(len(sequence.token_ids)) - self._pool.num_held(found)
        return self._pool.can_allocate(num_blocks + self._num_ahead(sequence) + growth)

    def _num_ahead(self, sequence: Sequence) -> int:
        return bisect_left(self.running, sequence.order, key=_order)

    def _start(self, sequence: Sequence, found: list[int]) -> None:
        self.waiting.remove(sequence)
        sequence.become(SequenceState.RUNNING)
        self._pool.share(found)
        num_blocks = self._pool.blocks_for(len(sequence.token_ids)) - len(found)
        sequence.blocks = found + self._pool.allocate(num_blocks)
        self.prefix_cache.begin(sequence, len(found))
        insort(self.running, sequence, key=_order)

    def _preempt(self, sequence: Sequence) -> None:
        self._put_back(sequence)
        self.num_preemptions += 1

    def _put_back(self, sequence: Sequence) -> None:
        """To its place in the queue; it will go on from its own tokens, which it computes or finds cached."""
        self.running.remove(sequence)
        self._release(sequence)
        sequence.become(SequenceState.WAITING)
        insort(self.waiting, sequence, key=_order)

    def _release(self, sequence: Sequence) -> None:
        self.prefix_cache.keep(sequence)
        self._pool.free(sequence.blocks)
        sequence.blocks = []
        sequence.num_computed_tokens = 0
        sequence.num_kept_blocks = 0
        self._ended.append(sequence.sequence_id)
