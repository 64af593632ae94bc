"""A worker group without torch: it runs plans exactly as ranks would, and refuses what ranks must refuse.

Keeps a mirror of the live sequences and a KV cache that remembers in each slot the token and all that came before
it, as real keys and values do, so a lost, overwritten or wrongly shared slot shows at once. The model is a
function; by default it counts, next token = last token + 1, so a lost or repeated token shows in the output.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from cluster.engine.executor import Capacity, ExecutorFailed
from workers.protocol import (
    KnownSequence,
    Logprobs,
    NewSequence,
    SamplingSettings,
    SequenceId,
    SequenceOutput,
    StepPlan,
    StepResult,
    StepTimings,
)

NextToken = Callable[[Sequence[int], SamplingSettings], int]
VOCAB_SIZE = 1000
_MAX_QUEUED_PLANS = 2


def count_up(token_ids: Sequence[int], sampling: SamplingSettings) -> int:
    """The counter model."""
    return (token_ids[-1] + 1) % VOCAB_SIZE


def _set_event() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


def scripted_logprobs(token_ids: Sequence[int], start: int, end: int, num_top: int) -> Logprobs:
    """Of the tokens [start, end): numbers that tell the token and its position, exact in float32."""
    positions = range(start, end)
    return Logprobs(
        start,
        tuple(-float(token_ids[position] * 1024 + position) for position in positions),
        num_top,
        tuple(token_ids[position] + rank for position in positions for rank in range(num_top)),
        tuple(-float(position + rank) for position in positions for rank in range(num_top)),
    )


class BadPlan(AssertionError):
    """A plan that no rank could carry out. A bug of the engine, so not an `ExecutorFailed`."""


@dataclass(slots=True)
class _Mirrored:
    token_ids: list[int]
    sampling: SamplingSettings
    num_prompt: int
    blocks: list[int]
    num_computed: int


@dataclass(frozen=True, slots=True)
class _Slot:
    text: int  # a number for the tokens up to this one
    token_id: int
    writer: SequenceId


@dataclass(slots=True)
class ScriptedExecutor:
    """Plans run when their result is taken, so two of them are in flight as truly as with real ranks.

    `die_at_step` fails while that step's result is taken; `die_on_submit` refuses to take that step's plan; both
    are over with the incarnation. `next_deaths` are the `die_at_step` of later incarnations, in turn.
    `failing_restarts` of the next restarts fail, and each of them waits for `may_restart`. `step_time_s` sleeps
    before each result. The limits are checked when they are given.
    """

    capacity: Capacity
    next_token: NextToken = count_up
    incarnation: int = 0
    die_at_step: int | None = None
    die_on_submit: int | None = None
    next_deaths: Sequence[int | None] = ()
    failing_restarts: int = 0
    may_restart: threading.Event = field(default_factory=_set_event)
    step_time_s: float = 0.0
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    verify: bool = True  # compare the whole KV cache of each row in each step
    mirror: dict[SequenceId, _Mirrored] = field(default_factory=dict)
    queued: deque[StepPlan] = field(default_factory=deque)
    executed: list[StepPlan] = field(default_factory=list)
    keep_executed: bool = True
    num_restarts: int = 0  # those that failed, too
    num_submitted: int = 0  # plans of this incarnation
    stopped: bool = False
    reads: set[tuple[SequenceId, SequenceId]] = field(
        default_factory=set
    )  # who found a slot that whom had written
    _slots: list[_Slot | None] = field(default_factory=list)
    _holders: Counter[int] = field(default_factory=Counter)  # of blocks

    def submit(self, plan: StepPlan) -> None:
        _demand(not self.stopped, "the executor has been stopped")
        if plan.step == self.die_on_submit:
            raise ExecutorFailed(f"scripted: cannot send step {plan.step}")
        _demand(plan.incarnation == self.incarnation, f"incarnation {plan.incarnation}, not {self.incarnation}")
        _demand(plan.step == self.num_submitted, f"step {plan.step} where {self.num_submitted} is due")
        _demand(len(self.queued) < _MAX_QUEUED_PLANS, f"{_MAX_QUEUED_PLANS} plans are in flight already")
        self.num_submitted += 1
        self.queued.append(plan)

    def take_result(self, timeout_s: float) -> StepResult:
        _demand(bool(self.queued), "no step is in flight")
        if self.step_time_s > timeout_s:
            time.sleep(timeout_s)
            raise ExecutorFailed(f"scripted: no result within {timeout_s} s")
        if self.step_time_s:
            time.sleep(self.step_time_s)
        plan = self.queued.popleft()
        if plan.step == self.die_at_step:
            raise ExecutorFailed(f"scripted: a rank died in step {plan.step}")
        if self.keep_executed:
            self.executed.append(plan)
        return StepResult(plan.incarnation, plan.step, self._run(plan), StepTimings(forward=1.0))

    def restart(self, cancelled: threading.Event) -> Mapping[str, float]:
        _demand(not self.stopped, "the executor has been stopped")
        self.num_restarts += 1
        while not self.may_restart.wait(0.001):
            if cancelled.is_set():
                raise ExecutorFailed("scripted: the restart was cancelled")
        if self.failing_restarts:
            self.failing_restarts -= 1
            raise ExecutorFailed("scripted: a rank died in the restart")
        self.incarnation += 1
        self.die_on_submit = None
        self.die_at_step, *self.next_deaths = self.next_deaths or [None]
        self.queued.clear()
        self.mirror.clear()
        self._holders.clear()
        self._slots.clear()
        self.num_submitted = 0
        return {"script": 0.0}

    def stop(self) -> None:
        self.stopped = True

    def _run(self, plan: StepPlan) -> tuple[SequenceOutput, ...]:
        for sequence_id in plan.ended:
            _demand(sequence_id in self.mirror, f"ended sequence {sequence_id} is not held")
            for block in self.mirror.pop(sequence_id).blocks:
                self._holders[block] -= 1
        for new in plan.new:
            self._add(new)
        rows: tuple[NewSequence | KnownSequence, ...] = plan.new + plan.known
        num_tokens = sum(row.num_new_tokens for row in rows)
        _demand(len({row.sequence_id for row in rows}) == len(rows), "a sequence is in the plan twice")
        _demand(self.max_num_seqs is None or len(rows) <= self.max_num_seqs, f"{len(rows)} rows")
        _demand(
            self.max_num_batched_tokens is None or num_tokens <= self.max_num_batched_tokens,
            f"{num_tokens} tokens in a step",
        )
        for known in plan.known:
            _demand(known.sequence_id in self.mirror, f"known sequence {known.sequence_id} is not held")
            self._hold(known.sequence_id, self.mirror[known.sequence_id], known.new_blocks)
        outputs = [self._compute(row.sequence_id, row.num_new_tokens) for row in rows]
        return tuple(output for output in outputs if output is not None)

    def _add(self, new: NewSequence) -> None:
        _demand(new.sequence_id not in self.mirror, f"new sequence {new.sequence_id} is held already")
        _demand(0 < new.num_prompt_tokens <= len(new.token_ids), "the prompt is longer than all tokens")
        _demand(0 <= new.num_computed_tokens < len(new.token_ids), "no token is left to compute")
        mirrored = _Mirrored(list(new.token_ids), new.sampling, new.num_prompt_tokens, [], new.num_computed_tokens)
        self.mirror[new.sequence_id] = mirrored
        num_found, rest = divmod(new.num_computed_tokens, self.capacity.block_size)
        _demand(rest == 0, f"sequence {new.sequence_id} finds {new.num_computed_tokens} tokens, not whole blocks")
        for block in new.blocks[:num_found]:
            self._holders[block] += 1
        mirrored.blocks.extend(new.blocks[:num_found])
        if self.verify:  # before the step writes anything: what it computes itself it must not claim
            self._write_and_check(new.sequence_id, mirrored, new.num_computed_tokens, new.num_computed_tokens)
        self._hold(new.sequence_id, mirrored, new.blocks[num_found:])

    def _hold(self, sequence_id: SequenceId, mirrored: _Mirrored, blocks: tuple[int, ...]) -> None:
        for block in blocks:
            _demand(0 <= block < self.capacity.num_blocks, f"block {block} does not exist")
            _demand(self._holders[block] == 0, f"block {block} of {sequence_id} is held by another sequence")
            self._holders[block] += 1
        mirrored.blocks.extend(blocks)

    def _compute(self, sequence_id: SequenceId, num_tokens: int) -> SequenceOutput | None:
        mirrored = self.mirror[sequence_id]
        start, end = mirrored.num_computed, mirrored.num_computed + num_tokens
        _demand(num_tokens > 0, f"sequence {sequence_id} computes {num_tokens} tokens")
        _demand(end <= len(mirrored.token_ids), f"sequence {sequence_id} has {len(mirrored.token_ids)} tokens")
        _demand(end <= len(mirrored.blocks) * self.capacity.block_size, f"sequence {sequence_id} lacks blocks")
        if self.verify:
            self._write_and_check(sequence_id, mirrored, start, end)
        mirrored.num_computed = end
        told = _prompt_logprobs(mirrored, start, end)
        if end < len(mirrored.token_ids):
            return None if told is None else SequenceOutput(sequence_id, (), prompt_logprobs=told)
        token = self.next_token(mirrored.token_ids, mirrored.sampling)
        mirrored.token_ids.append(token)
        num_top = mirrored.sampling.logprobs
        logprobs = None if num_top is None else scripted_logprobs(mirrored.token_ids, end, end + 1, num_top)
        return SequenceOutput(sequence_id, (token,), logprobs, told)

    def _write_and_check(self, sequence_id: SequenceId, mirrored: _Mirrored, start: int, end: int) -> None:
        size = self.capacity.block_size
        if not self._slots:
            self._slots = [None] * (self.capacity.num_blocks * size)
        text = 0
        for position in range(end):
            block = mirrored.blocks[position // size]
            index = block * size + position % size
            token_id = mirrored.token_ids[position]
            text = hash((text, token_id))
            if position >= start:
                _demand(self._holders[block] == 1, f"slot {index} is written, and others read block {block}")
                self._slots[index] = _Slot(text, token_id, sequence_id)
            slot = self._slots[index]
            _demand(
                slot is not None and slot.text == text,
                f"slot {index} holds {slot}, not token {token_id} at {position} of sequence {sequence_id}",
            )
            if slot is not None and slot.writer != sequence_id:
                self.reads.add((sequence_id, slot.writer))


def _prompt_logprobs(mirrored: _Mirrored, start: int, end: int) -> Logprobs | None:
    """What computing the tokens [start, end) tells of the prompt, where asked."""
    num_top, last = mirrored.sampling.prompt_logprobs, min(end + 1, mirrored.num_prompt)
    if num_top is None or start + 1 >= last:
        return None
    return scripted_logprobs(mirrored.token_ids, start + 1, last, num_top)


def _demand(condition: bool, message: str) -> None:
    if not condition:
        raise BadPlan(message)
