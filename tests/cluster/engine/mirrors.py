"""A rank's real mirror beside the scripted one, and what it must be after every step, whatever is in flight.

Ranks are behind the driver by the plans in flight. What these plans change is known, so both sides can be compared
after each step and not only when nothing runs.
"""

import threading
from collections import Counter
from collections.abc import Mapping

from cluster.engine.executor import Capacity
from cluster.engine.scheduler import Scheduler
from tests.fakes.scripted_executor import NextToken, ScriptedExecutor
from workers.config import WorkerConfig
from workers.protocol import SequenceId, SequenceOutput, StepPlan
from workers.sequences import SequenceMirror


class MirroringExecutor(ScriptedExecutor):
    """Runs each plan on a `SequenceMirror`, too, which refuses what a rank would refuse."""

    def __init__(
        self,
        capacity: Capacity,
        next_token: NextToken,
        *,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> None:
        super().__init__(
            capacity, next_token, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
        )
        self._config = WorkerConfig(
            model_path="scripted",
            tensor_parallel_size=1,
            device="cpu",
            dtype="float32",
            block_size=capacity.block_size,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        self.rank = SequenceMirror(self._config, capacity.num_blocks)

    def restart(self, cancelled: threading.Event) -> Mapping[str, float]:
        parts = super().restart(cancelled)
        self.rank = SequenceMirror(self._config, self.capacity.num_blocks)
        return parts

    def _run(self, plan: StepPlan) -> tuple[SequenceOutput, ...]:
        scheduled = self.rank.apply(plan)
        outputs = super()._run(plan)
        gained = {output.sequence_id: output.token_ids for output in outputs}
        self.rank.advance(scheduled, [gained[entry.sequence.sequence_id] for entry in scheduled if entry.samples])
        return outputs


def check_mirror(scheduler: Scheduler, rank: SequenceMirror) -> None:
    """Once every result that is there has been taken: mirror and plans in flight give the driver's state."""
    held = set(rank._live)
    coming_tokens, coming_blocks, coming_samples = (
        Counter[SequenceId](),
        Counter[SequenceId](),
        Counter[SequenceId](),
    )
    not_yet: set[SequenceId] = set()
    for plan, sampled in scheduler.in_flight:
        assert held.issuperset(plan.ended)
        new = {row.sequence_id for row in plan.new}
        held = held.difference(plan.ended) | new
        not_yet |= new
        for known in plan.known:
            coming_tokens[known.sequence_id] += known.num_new_tokens
            coming_blocks[known.sequence_id] += len(known.new_blocks)
        coming_samples.update(sequence.sequence_id for sequence in sampled)
    assert held.issuperset(scheduler._ended)
    assert held.difference(scheduler._ended) == {sequence.sequence_id for sequence in scheduler.running}
    for sequence in scheduler.running:
        number = sequence.sequence_id
        assert sequence.num_pending_tokens == coming_samples[number]
        if number in not_yet:
            continue
        mirrored = rank[number]
        assert list(mirrored.token_ids) == sequence.token_ids
        assert mirrored.num_computed + coming_tokens[number] == sequence.num_computed_tokens
        assert mirrored.blocks == sequence.blocks[: len(sequence.blocks) - coming_blocks[number]]
