"""One rank's step: apply the plan to the mirror, pack, run the model, sample, advance the mirror.

Knows the order of these and nothing of what is inside them; knows no transport. Every rank executes the same
plans in the same order and ends each with an equal mirror.
"""

import time
from typing import Protocol, runtime_checkable

import torch

from model_shards.group import TensorParallelGroup
from model_shards.model import ShardedModel
from workers.batch import Batch, BatchPacker
from workers.config import WorkerConfig
from workers.forward import ForwardPass, make_forward
from workers.prompt_logprobs import PromptScorer
from workers.protocol import Logprobs, SequenceId, SequenceOutput, StepPlan, StepResult, StepTimings
from workers.sampling.adjustments import check_token_ids
from workers.sampling.logprobs import columns
from workers.sampling.sampler import Draw, Sampler, Samples
from workers.sequences import SequenceMirror
from workers.staging import Readback


@runtime_checkable
class TimesCollectives(Protocol):
    """What a group may offer beside its collectives: `workers.process_group.TimedGroup` does."""

    def take_seconds(self) -> float:
        """Seconds inside collectives since the last call."""
        ...


class Runner:
    """Owns a rank's KV memory and mirror for one incarnation; used by one thread.

    Invariant, with `batch_invariant` models: a sequence's logits have equal bits in any batch, for any chunking of
    its prompt and after a replay. There is one path, whatever `config.batch_invariant` says: a call over fixed
    chunks of keys costs no more here than one over ragged lengths.
    """

    def __init__(
        self,
        model: ShardedModel,
        group: TensorParallelGroup,
        config: WorkerConfig,
        num_blocks: int,
        forward: ForwardPass | None = None,
    ) -> None:
        """A collective. Raises `OutOfMemory` when the blocks do not fit. `forward` is what the device asks for,
        unless it is given.
        """
        self._model = model
        self._group = group
        self._timed = group if isinstance(group, TimesCollectives) else None
        self._mirror = SequenceMirror(config, num_blocks)
        self._packer = BatchPacker(config)
        self._forward = make_forward(model, config, num_blocks) if forward is None else forward
        self._readback = Readback(torch.device(config.device), config.step_deadline_s)
        self._sampler = Sampler(
            group,
            self._readback,
            vocab_size=model.vocab_size,
            local_start=model.local_vocab_start,
            local_size=model.local_vocab_size,
        )
        self._prompts = PromptScorer(model, self._sampler)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. Rank 0's result is the one that is sent; others lack its log-probabilities and timings.

        Raises `ProtocolError` for a plan that cannot be and `GroupBroken` when a peer is gone; the runner cannot
        be used after either.
        """
        self._collective_seconds()
        started = time.perf_counter()
        for new in plan.new:
            check_token_ids(new, self._model.vocab_size)
        scheduled = self._mirror.apply(plan)
        if not scheduled:
            return self._heartbeat(plan)
        batch = self._packer.pack(scheduled)
        forward = self._forward.prepare(batch)
        prepared = time.perf_counter()

        hidden = forward.run()
        prompt_logprobs = self._prompts.score(hidden, batch)
        sampling = batch.sampling
        logits = self._model.local_logits(hidden[forward.sampled_rows]) if sampling else None
        forward_collectives = self._collective_seconds()
        computed = time.perf_counter()

        samples = Samples([], {}) if logits is None else self._sampler.sample(logits, _draws(batch))
        outputs = _outputs(batch, samples, prompt_logprobs)
        self._mirror.advance(batch.scheduled, [(token_id,) for token_id in samples.token_ids])
        sample_collectives = self._collective_seconds()
        timings = StepTimings(
            prepare=prepared - started,
            forward=computed - prepared - forward_collectives,
            collectives=forward_collectives + sample_collectives,
            sample=time.perf_counter() - computed - sample_collectives,
        )
        return StepResult(plan.incarnation, plan.step, outputs, timings)

    def _heartbeat(self, plan: StepPlan) -> StepResult:
        """Nothing to compute: show that every rank still answers."""
        started = time.perf_counter()
        self._readback.fetch(self._group.all_reduce(torch.zeros(1, device=self._readback.device)))
        timings = StepTimings(collectives=time.perf_counter() - started)
        return StepResult(plan.incarnation, plan.step, timings=timings)

    def _collective_seconds(self) -> float:
        return self._timed.take_seconds() if self._timed is not None else 0.0


def _draws(batch: Batch) -> list[Draw]:
    """What is asked for each row that samples."""
    return [
        Draw(sequence.sampling, len(sequence.token_ids), sequence.token_ids, sequence.num_prompt_tokens)
        for sequence in batch.sampling
    ]


def _outputs(
    batch: Batch, samples: Samples, prompt_logprobs: dict[SequenceId, Logprobs]
) -> tuple[SequenceOutput, ...]:
    """What the sequences gained, in batch order. The mirror must not have advanced yet."""
    outputs = []
    row = 0
    for entry in batch.scheduled:
        sequence = entry.sequence
        about_prompt = prompt_logprobs.get(sequence.sequence_id)
        if entry.samples:
            found = samples.scores.get(row)
            logprobs = None if found is None else columns(len(sequence.token_ids), [found])
            outputs.append(SequenceOutput(sequence.sequence_id, (samples.token_ids[row],), logprobs, about_prompt))
            row += 1
        elif about_prompt is not None:
            outputs.append(SequenceOutput(sequence.sequence_id, (), prompt_logprobs=about_prompt))
    return tuple(outputs)
