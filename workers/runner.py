"""One rank's step: apply the plan to the mirror, pack, run the model, sample, advance the mirror.

Knows the order of these and nothing of what is inside them; knows no transport. Every rank executes the same
plans in the same order and ends each with an equal mirror.
"""

import time
from typing import Protocol

import torch

from model_shards.group import TensorParallelGroup
from model_shards.model import ShardedModel
from workers.attention.select import select_attention
from workers.batch import BatchPacker
from workers.config import WorkerConfig
from workers.kv_cache import KvCache
from workers.protocol import SequenceOutput, StepPlan, StepResult, StepTimings
from workers.sampling.sampler import Draw, Sampler
from workers.sequences import SequenceMirror


class TimedCollectives(TensorParallelGroup, Protocol):
    """A group that knows how long its collectives took."""

    def take_seconds(self) -> float:
        """Seconds inside collectives since the last call."""
        ...


class Runner:
    """Owns a rank's KV memory and mirror for one incarnation."""

    def __init__(
        self, model: ShardedModel, group: TimedCollectives, config: WorkerConfig, num_blocks: int
    ) -> None:
        """A collective. Raises `OutOfMemory` when the blocks do not fit."""
        cache = KvCache(
            model,
            num_blocks=num_blocks,
            block_size=config.block_size,
            dtype=config.dtype,
            device=config.device,
        )
        self._model = model
        self._group = group
        self._mirror = SequenceMirror(config, num_blocks)
        self._packer = BatchPacker(config)
        self._attention = select_attention(model, cache)
        self._sampler = Sampler(
            group,
            vocab_size=model.vocab_size,
            local_start=model.local_vocab_start,
            local_size=model.local_vocab_size,
        )

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. The result is equal on every rank but for its timings; rank 0's is the one that is sent.

        Raises `ProtocolError` for a plan that cannot be and `GroupBroken` when a peer is gone; the runner
        cannot be used after either.
        """
        self._group.take_seconds()
        started = time.perf_counter()
        scheduled = self._mirror.apply(plan)
        if not scheduled:
            self._group.all_reduce(torch.zeros(1))
            return StepResult(
                plan.incarnation, plan.step, timings=StepTimings(collectives=self._group.take_seconds())
            )
        batch = self._packer.pack(scheduled)
        attention = self._attention.prepare(batch.attention)
        packed = time.perf_counter()

        hidden = self._model.forward(batch.token_ids, batch.positions, attention)
        sampling = batch.sampling
        logits = self._model.local_logits(hidden[batch.sampled_rows]) if sampling else None
        forward_collectives = self._group.take_seconds()
        computed = time.perf_counter()

        draws = [Draw(sequence.sampling, len(sequence.token_ids)) for sequence in sampling]
        token_ids = [] if logits is None else self._sampler.sample(logits, draws)
        self._mirror.advance(batch.scheduled, [(token_id,) for token_id in token_ids])
        outputs = tuple(
            SequenceOutput(sequence.sequence_id, (token_id,))
            for sequence, token_id in zip(sampling, token_ids, strict=True)
        )
        sample_collectives = self._group.take_seconds()
        timings = StepTimings(
            prepare=packed - started,
            forward=computed - packed - forward_collectives,
            collectives=forward_collectives + sample_collectives,
            sample=time.perf_counter() - computed - sample_collectives,
        )
        return StepResult(plan.incarnation, plan.step, outputs, timings)
