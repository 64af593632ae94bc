"""One rank's step on thread ranks: equal bits in any batch, transformers' tokens, seeded draws, heartbeats."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from model_shards.group import SingleRank, TensorParallelGroup
from model_shards.model import AttentionContext, ShardedModel
from model_shards.weights.loader import load_model
from tests.fakes.checkpoints import write_counter_model, write_tiny_llama
from tests.fakes.thread_group import ThreadGroup, run_ranks
from tests.workers.plans import GREEDY, Job, PlanMaker, random_prompts, run_to_the_end, worker_config
from workers.errors import GroupBroken, ProtocolError
from workers.process_group import TimedGroup
from workers.protocol import KnownSequence, NewSequence, SamplingSettings, SequenceId, StepPlan, StepResult
from workers.runner import Runner

VOCABULARY = 1003
# Around the borders of blocks (8, 16) and of the chunks of 256 keys that attention reads.
LENGTHS = (1, 2, 3, 15, 16, 17, 33, 64, 100, 129, 250, 255, 256, 257, 300, 401, 5)
TOKENS = 6


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@dataclass
class Recorded:
    """A `ShardedModel` that keeps the logits of each step."""

    model: ShardedModel
    logits: list[Tensor] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def forward(self, token_ids: Tensor, positions: Tensor, attention: AttentionContext) -> Tensor:
        return self.model.forward(token_ids, positions, attention)

    def local_logits(self, hidden: Tensor) -> Tensor:
        logits = self.model.local_logits(hidden)
        self.logits.append(logits.clone())
        return logits


@dataclass
class Outcome:
    """What one rank saw: tokens of each job, and its shard of the logits of every token, in order."""

    tokens: dict[int, list[int]]
    logits: dict[int, Tensor]


def load(path: Path, group: TensorParallelGroup, dtype: torch.dtype = torch.float32) -> Recorded:
    return Recorded(load_model(path, group, device=torch.device("cpu"), dtype=dtype))


def generate(
    model: Recorded,
    group: TensorParallelGroup,
    jobs: Mapping[int, Job],
    *,
    chunk: Callable[[], int] = lambda: 10_000,
    block_size: int = 16,
    preempt: Callable[[PlanMaker], None] = lambda _: None,
    seed: int = 0,
    **settings: Any,
) -> Outcome:
    """Run fresh copies of `jobs` together to their ends on one rank."""
    config = worker_config(block_size=block_size, tensor_parallel_size=group.size, **settings)
    maker = PlanMaker.of_copies(jobs, config, num_blocks=512, seed=seed)
    rows: dict[int, list[Tensor]] = {number: [] for number in jobs}

    def after_step(result: StepResult) -> None:
        for row, output in enumerate(result.outputs):
            rows[output.sequence_id].append(model.logits[-1][row])
        preempt(maker)

    runner = Runner(model, group, config, num_blocks=512)
    tokens = run_to_the_end(runner, maker, chunk=chunk, after_step=after_step)
    return Outcome(tokens, {number: torch.stack(found) for number, found in rows.items()})


def greedy_jobs(lengths: Sequence[int] = LENGTHS, num_tokens: int = TOKENS) -> dict[int, Job]:
    prompts = random_prompts(lengths, VOCABULARY)
    return {number: Job(prompt, num_tokens) for number, prompt in enumerate(prompts)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_logits_are_bitwise_equal_alone_in_any_batch_and_chunking(
    tiny_llama: Path, num_ranks: int, dtype: str
) -> None:
    jobs = greedy_jobs()

    def work(group: ThreadGroup) -> None:
        model = load(tiny_llama, group, getattr(torch, dtype))
        alone = {
            number: generate(model, group, {number: job}, dtype=dtype).logits[number]
            for number, job in jobs.items()
        }
        source = random.Random(num_ranks)  # equal on all ranks
        for batch_size in (2, 3, 4, 5, 8, 11, 17):
            numbers = source.sample(sorted(jobs), batch_size)
            together = generate(
                model,
                group,
                {number: jobs[number] for number in numbers},
                chunk=lambda: source.choice([1, 2, 3, 5, 16, 31, 100]),
                block_size=source.choice([8, 16, 32]),
                seed=batch_size,
                dtype=dtype,
            )
            for number in numbers:
                assert torch.equal(together.logits[number], alone[number]), (batch_size, number)

    run_ranks(num_ranks, work)


@pytest.mark.parametrize(("num_ranks", "num_threads"), [(1, 1), (2, 1), (1, 2), (2, 2), (1, 3)])
def test_a_replay_continues_with_equal_bits(
    tiny_llama: Path, num_ranks: int, num_threads: int, intra_op_threads: Callable[[int], None]
) -> None:
    intra_op_threads(num_threads)
    jobs = greedy_jobs((3, 40, 254, 300))

    def work(group: ThreadGroup) -> None:
        model = load(tiny_llama, group)
        undisturbed = generate(model, group, jobs)
        source = random.Random(5)

        def preempt(maker: PlanMaker) -> None:
            unfinished = [number for number, job in maker.jobs.items() if job.live]
            if unfinished and source.random() < 0.4:
                maker.release(source.choice(unfinished))

        disturbed = generate(model, group, jobs, preempt=preempt, chunk=lambda: source.choice([7, 64, 500]))
        for number in jobs:
            assert torch.equal(disturbed.logits[number], undisturbed.logits[number])

    run_ranks(num_ranks, work)


@pytest.fixture(scope="session")
def tokens_of_transformers(tiny_llama: Path) -> dict[int, list[int]]:
    reference = LlamaForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    return {
        number: reference.generate(
            torch.tensor([job.token_ids]), max_new_tokens=TOKENS, do_sample=False, eos_token_id=None
        )[0, len(job.token_ids) :].tolist()
        for number, job in greedy_jobs().items()
    }


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_greedy_tokens_are_those_of_transformers(
    tiny_llama: Path, tokens_of_transformers: dict[int, list[int]], num_ranks: int
) -> None:
    def work(group: ThreadGroup) -> dict[int, list[int]]:
        return generate(load(tiny_llama, group), group, greedy_jobs()).tokens

    for tokens in run_ranks(num_ranks, work):
        assert tokens == tokens_of_transformers


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_seeded_draws_are_the_same_in_any_company(tiny_llama: Path, num_ranks: int) -> None:
    prompts = random_prompts([7] * 6, VOCABULARY)
    settings = [SamplingSettings(0.8, 40 * (row % 2), 0.95, seed=row, choice=row % 3) for row in range(5)]
    jobs = {
        row: Job(prompt, 12, sampling=choice)
        for row, (prompt, choice) in enumerate(zip(prompts, [*settings, GREEDY], strict=True))
    }

    def work(group: ThreadGroup) -> dict[int, list[int]]:
        model = load(tiny_llama, group)
        alone = {number: generate(model, group, {number: job}).tokens[number] for number, job in jobs.items()}
        source = random.Random(3)
        for seed in range(3):
            assert generate(model, group, jobs, chunk=lambda: source.choice([1, 3, 9]), seed=seed).tokens == alone
        return alone

    outcomes = run_ranks(num_ranks, work)
    assert all(tokens == outcomes[0] for tokens in outcomes)
    assert len({tuple(tokens) for tokens in outcomes[0].values()}) == len(jobs)


def test_the_counter_counts_through_chunks_and_batches(tmp_path: Path) -> None:
    path = write_counter_model(tmp_path / "counter", cycle=range(100))
    jobs = {number: Job([number, number + 1], 30) for number in range(9)}
    outcome = generate(load(path, SingleRank()), SingleRank(), jobs, chunk=lambda: 1)
    assert outcome.tokens == {number: [(number + 2 + place) % 100 for place in range(30)] for number in jobs}


def make_runner(path: Path, group: TensorParallelGroup, **settings: Any) -> Runner:
    return Runner(load(path, group), group, worker_config(**settings), num_blocks=8)


def new_sequence(token_ids: Sequence[int], num_new: int, number: int = 1) -> NewSequence:
    return NewSequence(SequenceId(number), tuple(token_ids), len(token_ids), GREEDY, (0, 1), 0, num_new)


def test_the_result_names_who_sampled_and_when(tiny_llama: Path) -> None:
    runner = make_runner(tiny_llama, SingleRank())
    first = runner.execute(StepPlan(3, 0, new=(new_sequence([4, 5, 6], 2), new_sequence([7], 1, number=2))))
    assert (first.incarnation, first.step) == (3, 0)
    assert [output.sequence_id for output in first.outputs] == [2]
    second = runner.execute(StepPlan(3, 1, known=(KnownSequence(SequenceId(1), 1),)))
    assert [output.sequence_id for output in second.outputs] == [1]
    assert all(0 <= token < VOCABULARY for token in second.outputs[0].token_ids)


def test_timings_split_the_step(tiny_llama: Path) -> None:
    def work(group: ThreadGroup) -> StepResult:
        timed = TimedGroup()
        timed.attach(group)  # type: ignore[arg-type]  # threads need no end
        return make_runner(tiny_llama, timed).execute(StepPlan(0, 0, new=(new_sequence([4, 5, 6], 3),)))

    for result in run_ranks(2, work):
        timings = result.timings
        assert min(timings.prepare, timings.forward, timings.collectives, timings.sample) > 0


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_plan_without_sequences_is_one_collective(tiny_llama: Path, num_ranks: int) -> None:
    def work(group: ThreadGroup) -> StepResult:
        runner = make_runner(tiny_llama, group)
        runner.execute(StepPlan(0, 0, new=(new_sequence([4], 1),)))
        return runner.execute(StepPlan(0, 1, ended=(SequenceId(1),)))

    assert all(result.outputs == () and result.step == 1 for result in run_ranks(num_ranks, work))


def test_a_heartbeat_fails_when_a_peer_is_gone(tiny_llama: Path) -> None:
    def work(group: ThreadGroup) -> None:
        runner = make_runner(tiny_llama, group)
        if group.rank == 1:
            group.abort()
        else:
            runner.execute(StepPlan(0, 0))

    with pytest.raises(GroupBroken, match="a peer left"):
        run_ranks(2, work)


def test_a_plan_that_cannot_be_is_refused(tiny_llama: Path) -> None:
    runner = make_runner(tiny_llama, SingleRank())
    with pytest.raises(ProtocolError, match="sequence 1 cannot compute 4 tokens"):
        runner.execute(StepPlan(0, 0, new=(new_sequence([4, 5, 6], 4),)))
