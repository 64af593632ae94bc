"""The mirror of the live sequences that every rank keeps: tokens, progress and blocks.

Knows token ids and block ids; knows nothing of tensors, KV memory or who asked. All ranks apply the same plans
and the same sampled ids in the same order, so their mirrors are equal. What cannot be right is refused with
`ProtocolError`, after which the mirror must not be used any more: the whole incarnation ends with it.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from workers.config import WorkerConfig
from workers.errors import ProtocolError
from workers.protocol import KnownSequence, NewSequence, SamplingSettings, SequenceId, StepPlan


@dataclass(slots=True)
class LiveSequence:
    """Invariant between steps: `num_computed` <= len(`token_ids`), and `blocks` cover what is computed."""

    sequence_id: SequenceId
    token_ids: "array[int]"  # of type q: numpy reads it without a copy
    num_prompt_tokens: int
    sampling: SamplingSettings
    blocks: list[int]
    num_computed: int


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """What a sequence does in one step: compute `num_new` tokens from position `start` on."""

    sequence: LiveSequence
    start: int
    num_new: int

    @property
    def end(self) -> int:
        """Tokens in the KV cache after this step."""
        return self.start + self.num_new

    @property
    def samples(self) -> bool:
        """Whether the step reaches the end of the known tokens, and so yields the next one."""
        return self.end == len(self.sequence.token_ids)


class SequenceMirror:
    """The live sequences of one incarnation, by id."""

    def __init__(self, config: WorkerConfig, num_blocks: int) -> None:
        self._config = config
        self._num_blocks = num_blocks
        self._live: dict[SequenceId, LiveSequence] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __getitem__(self, sequence_id: SequenceId) -> LiveSequence:
        return self._live[sequence_id]

    def apply(self, plan: StepPlan) -> list[ScheduledSequence]:
        """Drop what ended, add what is new, and return what runs, in plan order. Raises `ProtocolError`."""
        for sequence_id in plan.ended:
            if self._live.pop(sequence_id, None) is None:
                raise ProtocolError(f"step {plan.step} ends sequence {sequence_id}, which is not live here")
        known = [self._extend(change, plan.step) for change in plan.known]
        scheduled = [*known, *(self._admit(new, plan.step) for new in plan.new)]
        self._check_step(scheduled, plan.step)
        return scheduled

    def advance(self, scheduled: Iterable[ScheduledSequence], sampled: Sequence[Sequence[int]]) -> None:
        """Record a finished step. `sampled` has the new tokens of each sequence that samples, in order."""
        remaining = iter(sampled)
        for entry in scheduled:
            if entry.samples:
                entry.sequence.token_ids.extend(next(remaining))
            entry.sequence.num_computed = entry.end

    def _extend(self, change: KnownSequence, step: int) -> ScheduledSequence:
        sequence = self._live.get(change.sequence_id)
        if sequence is None:
            raise ProtocolError(f"step {step} continues sequence {change.sequence_id}, which is not live here")
        if change.new_blocks:
            self._check_blocks(change.new_blocks, change.sequence_id)
            sequence.blocks.extend(change.new_blocks)
        return self._schedule(sequence, change.num_new_tokens)

    def _admit(self, new: NewSequence, step: int) -> ScheduledSequence:
        name = f"sequence {new.sequence_id}"
        if new.sequence_id in self._live:
            raise ProtocolError(f"step {step} adds {name}, which is live here already")
        num_tokens = len(new.token_ids)
        if not 1 <= new.num_prompt_tokens <= num_tokens:
            raise ProtocolError(f"{name} has {num_tokens} tokens, {new.num_prompt_tokens} of them prompt")
        if not 0 <= new.num_computed_tokens < num_tokens:
            raise ProtocolError(f"{name} has {num_tokens} tokens, {new.num_computed_tokens} of them computed")
        self._check_blocks(new.blocks, new.sequence_id)
        sequence = LiveSequence(
            new.sequence_id,
            array("q", new.token_ids),
            new.num_prompt_tokens,
            new.sampling,
            list(new.blocks),
            new.num_computed_tokens,
        )
        scheduled = self._schedule(sequence, new.num_new_tokens)
        self._live[new.sequence_id] = sequence
        return scheduled

    def _schedule(self, sequence: LiveSequence, num_new: int) -> ScheduledSequence:
        name = f"sequence {sequence.sequence_id}"
        known, end = len(sequence.token_ids), sequence.num_computed + num_new
        if num_new < 1 or end > known:
            raise ProtocolError(
                f"{name} cannot compute {num_new} tokens: {sequence.num_computed} of its {known} are computed"
            )
        if end > self._config.max_model_len:
            raise ProtocolError(
                f"{name} would have {end} tokens, above max_model_len {self._config.max_model_len}"
            )
        room = len(sequence.blocks) * self._config.block_size
        if end > room:
            raise ProtocolError(
                f"{name} would have {end} tokens in {len(sequence.blocks)} blocks, which hold {room}"
            )
        return ScheduledSequence(sequence, sequence.num_computed, num_new)

    def _check_blocks(self, blocks: Sequence[int], sequence_id: SequenceId) -> None:
        if blocks and not (min(blocks) >= 0 and max(blocks) < self._num_blocks):
            raise ProtocolError(
                f"sequence {sequence_id} is given blocks {list(blocks)}; there are {self._num_blocks}"
            )

    def _check_step(self, scheduled: list[ScheduledSequence], step: int) -> None:
        config = self._config
        if len({entry.sequence.sequence_id for entry in scheduled}) < len(scheduled):
            raise ProtocolError(f"step {step} names a sequence twice")
        if len(scheduled) > config.max_num_seqs:
            raise ProtocolError(
                f"step {step} has {len(scheduled)} sequences, above max_num_seqs {config.max_num_seqs}"
            )
        num_tokens = sum(entry.num_new for entry in scheduled)
        if num_tokens > config.max_num_batched_tokens:
            raise ProtocolError(
                f"step {step} has {num_tokens} tokens, above max_num_batched_tokens "
                f"{config.max_num_batched_tokens}"
            )
