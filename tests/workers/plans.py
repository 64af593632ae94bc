"""Plans for tests of one rank: a small driver that gives out shuffled blocks and drives runners to the end."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from workers.config import WorkerConfig
from workers.protocol import (
    KnownSequence,
    NewSequence,
    SamplingSettings,
    SequenceId,
    StepPlan,
    StepResult,
)
from workers.runner import Runner

GREEDY = SamplingSettings(temperature=0.0, top_k=0, top_p=1.0, seed=0, choice=0)


def worker_config(**settings: Any) -> WorkerConfig:
    """Small limits, float32 on CPU; any of them can be given."""
    defaults: dict[str, Any] = {
        "model_path": "",
        "tensor_parallel_size": 1,
        "device": "cpu",
        "dtype": "float32",
        "block_size": 16,
        "max_model_len": 1024,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 4096,
    }
    return WorkerConfig(**{**defaults, **settings})


@dataclass
class Job:
    """One sequence to generate. `token_ids` grow; the first `num_prompt` of them were given."""

    token_ids: list[int]
    num_tokens: int  # to generate
    sampling: SamplingSettings = GREEDY
    num_prompt: int = field(init=False)
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    live: bool = False

    def __post_init__(self) -> None:
        self.num_prompt = len(self.token_ids)

    @property
    def generated(self) -> list[int]:
        return self.token_ids[self.num_prompt :]

    @property
    def finished(self) -> bool:
        return len(self.generated) >= self.num_tokens


class PlanMaker:
    """Plans for a set of jobs until all have finished, with blocks from a shuffled pool."""

    def __init__(self, jobs: Mapping[int, Job], config: WorkerConfig, num_blocks: int, *, seed: int = 0) -> None:
        self.jobs = dict(jobs)
        self._config = config
        self._random = random.Random(seed)
        self._free = list(range(num_blocks))
        self._random.shuffle(self._free)
        self._ended: list[SequenceId] = []
        self._step = 0

    @classmethod
    def of_copies(
        cls, jobs: Mapping[int, Job], config: WorkerConfig, num_blocks: int, *, seed: int = 0
    ) -> "PlanMaker":
        """For fresh copies of `jobs`, which stay as they are."""
        copies = {
            number: Job(list(job.token_ids), job.num_tokens, sampling=job.sampling) for number, job in jobs.items()
        }
        return cls(copies, config, num_blocks, seed=seed)

    def plan(self, chunk: Callable[[], int]) -> StepPlan | None:
        """The next step in random order, at most `chunk()` tokens for each job; None when all have finished."""
        running = [number for number, job in self.jobs.items() if not job.finished]
        if not running:
            return None
        self._random.shuffle(running)
        new, known = [], []
        for number in running:
            job = self.jobs[number]
            count = min(chunk(), len(job.token_ids) - job.num_computed)
            blocks = self._grow(job, job.num_computed + count)
            if job.live:
                known.append(KnownSequence(SequenceId(number), count, blocks))
            else:
                new.append(
                    NewSequence(
                        SequenceId(number),
                        tuple(job.token_ids),
                        job.num_prompt,
                        job.sampling,
                        blocks,
                        job.num_computed,
                        count,
                    )
                )
                job.live = True
            job.num_computed += count
        plan = StepPlan(0, self._step, tuple(new), tuple(known), tuple(self._ended))
        self._ended.clear()
        self._step += 1
        return plan

    def record(self, result: StepResult) -> None:
        for output in result.outputs:
            job = self.jobs[output.sequence_id]
            job.token_ids.extend(output.token_ids)
            if job.finished:
                self.release(output.sequence_id)

    def release(self, number: int) -> None:
        """End the sequence or, unless it has finished, preempt it: its blocks go back and it starts anew."""
        job = self.jobs[number]
        if job.live:
            self._ended.append(SequenceId(number))
        self._free.extend(job.blocks)
        self._random.shuffle(self._free)
        job.blocks.clear()
        job.num_computed, job.live = 0, False

    def _grow(self, job: Job, num_tokens: int) -> tuple[int, ...]:
        missing = -(-num_tokens // self._config.block_size) - len(job.blocks)
        blocks = tuple(self._free.pop() for _ in range(missing))
        job.blocks.extend(blocks)
        return blocks


def run_to_the_end(
    runner: Runner,
    maker: PlanMaker,
    *,
    chunk: Callable[[], int] = lambda: 10_000,
    after_step: Callable[[StepResult], None] = lambda _: None,
) -> dict[int, list[int]]:
    """Execute plans until every job has finished; the tokens that each has generated."""
    while (plan := maker.plan(chunk)) is not None:
        result = runner.execute(plan)
        maker.record(result)
        after_step(result)
    return {number: job.generated for number, job in maker.jobs.items()}


def random_prompts(lengths: Sequence[int], vocab_size: int, *, seed: int = 0) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(vocab_size) for _ in range(length)] for length in lengths]
