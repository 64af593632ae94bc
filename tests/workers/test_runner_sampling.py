"""Penalties and log-probabilities on thread ranks: equal in any batch, chunking, replay and group.

And equal to those of transformers.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from model_shards.group import SingleRank, TensorParallelGroup
from model_shards.model import ShardedModel
from model_shards.weights.loader import load_model
from tests.fakes.checkpoints import write_tiny_llama
from tests.fakes.thread_group import ThreadGroup, run_ranks
from tests.workers.plans import GREEDY, Job, PlanMaker, random_prompts, run_to_the_end, worker_config
from workers.errors import ProtocolError
from workers.protocol import Adjustments, Logprobs, NewSequence, SamplingSettings, SequenceId, StepPlan, StepResult
from workers.runner import Runner

VOCABULARY = 1003
NUM_TOP = 3
Row = tuple[float, tuple[int, ...], tuple[float, ...]]  # a token's log-probability, the likeliest ids, theirs


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@dataclass
class Outcome:
    """What one rank reported: tokens of each job, and by position the rows of what was asked of them."""

    tokens: dict[int, list[int]]
    rows: dict[int, dict[int, Row]] = field(default_factory=dict)

    def keep(self, sequence_id: int, logprobs: Logprobs | None) -> None:
        if logprobs is None:
            return
        known = self.rows.setdefault(sequence_id, {})
        for index, chosen in enumerate(logprobs.chosen):
            part = slice(index * logprobs.num_top, (index + 1) * logprobs.num_top)
            row = (chosen, logprobs.top_ids[part], logprobs.top[part])
            assert known.setdefault(logprobs.start + index, row) == row, "a replay says something else"


def load(path: Path, group: TensorParallelGroup) -> ShardedModel:
    return load_model(path, group, device=torch.device("cpu"), dtype=torch.float32)


def generate(
    model: ShardedModel,
    group: TensorParallelGroup,
    jobs: Mapping[int, Job],
    *,
    chunk: Callable[[], int] = lambda: 10_000,
    preempt: Callable[[PlanMaker], None] = lambda _: None,
) -> Outcome:
    config = worker_config(tensor_parallel_size=group.size)
    maker = PlanMaker.of_copies(jobs, config, num_blocks=256)
    outcome = Outcome({})

    def after_step(result: StepResult) -> None:
        for output in result.outputs:
            outcome.keep(output.sequence_id, output.logprobs)
            outcome.keep(output.sequence_id, output.prompt_logprobs)
        preempt(maker)

    runner = Runner(model, group, config, num_blocks=256)
    outcome.tokens = run_to_the_end(runner, maker, chunk=chunk, after_step=after_step)
    return outcome


def preempting(source: random.Random, times: int = 6) -> Callable[[PlanMaker], None]:
    """Preempt a random sequence, `times` times: for ever, and a long prompt would never get through."""
    left = times

    def preempt(maker: PlanMaker) -> None:
        nonlocal left
        live = [number for number, job in maker.jobs.items() if job.live]
        if live and left and source.random() < 0.5:
            left -= 1
            maker.release(source.choice(live))

    return preempt


def mixed_jobs() -> dict[int, Job]:
    """Adjusted and plain, seeded and greedy rows, some of which ask for log-probabilities."""
    adjustments = (
        None,
        Adjustments(repetition_penalty=1.8, frequency_penalty=0.9, presence_penalty=-0.4),
        Adjustments(logit_bias=tuple((token, 6.0) for token in range(50)), frequency_penalty=1.5),
        Adjustments(allowed_token_ids=tuple(range(0, 1003, 7)), min_tokens=6, stop_token_ids=(7, 14, 21)),
        Adjustments(bad_words=tuple((token,) for token in range(600)), repetition_penalty=0.7),
    )
    return {
        number: Job(
            prompt,
            10,
            sampling=SamplingSettings(
                0.9 * (number % 4 > 0),
                30 * (number % 2),
                0.95,
                seed=number,
                choice=number % 3,
                min_p=0.01 * (number % 3),
                adjustments=adjustments[number % len(adjustments)],
                logprobs=NUM_TOP if number % 2 else None,
                prompt_logprobs=NUM_TOP if number % 3 == 0 else None,
            ),
        )
        for number, prompt in enumerate(random_prompts([5, 17, 40, 3, 90, 33, 8, 260, 21, 64], VOCABULARY, seed=4))
    }


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_same_alone_in_any_batch_chunking_and_replay(tiny_llama: Path, num_ranks: int) -> None:
    jobs = mixed_jobs()

    def work(group: ThreadGroup) -> None:
        model = load(tiny_llama, group)
        together = generate(model, group, jobs)
        assert (len(together.rows) == 7) == (group.rank == 0)
        for number, job in jobs.items():
            alone = generate(model, group, {number: job})
            assert alone.tokens[number] == together.tokens[number]
            assert alone.rows.get(number) == together.rows.get(number)  # bit for bit
        source = random.Random(9)  # equal on all ranks
        for _ in range(2):
            disturbed = generate(
                model, group, jobs, chunk=lambda: source.choice([3, 30, 200]), preempt=preempting(source)
            )
            assert disturbed == together

    run_ranks(num_ranks, work)


def test_equal_tokens_on_one_two_and_three_ranks(tiny_llama: Path) -> None:
    jobs = mixed_jobs()

    def work(group: ThreadGroup) -> dict[int, list[int]]:
        return generate(load(tiny_llama, group), group, jobs, chunk=lambda: 50).tokens

    (expected,) = run_ranks(1, work)
    assert run_ranks(2, work) + run_ranks(3, work) == [expected] * 5
    assert all(token >= 600 for token in expected[4] + expected[9])
    assert all(token % 7 == 0 for token in expected[3] + expected[8])
    assert not {7, 14, 21} & {*expected[3][:6], *expected[8][:6]}


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("chunk", [10_000, 7])
def test_log_probabilities_are_those_of_transformers(tiny_llama: Path, num_ranks: int, chunk: int) -> None:
    """Across more rows than go through the head at once, with and without chunks, and with preemptions."""
    settings = replace(
        GREEDY,
        logprobs=5,
        prompt_logprobs=5,
        adjustments=Adjustments(repetition_penalty=3.0, frequency_penalty=2.0),
    )
    prompts = random_prompts([1, 2, 30, 150], VOCABULARY)
    jobs = {number: Job(prompt, 5, sampling=settings) for number, prompt in enumerate(prompts)}

    def work(group: ThreadGroup) -> Outcome:
        source = random.Random(1)
        return generate(load(tiny_llama, group), group, jobs, chunk=lambda: chunk, preempt=preempting(source))

    outcome, *others = run_ranks(num_ranks, work)
    assert all(other.rows == {} for other in others)
    reference = LlamaForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    for number, job in jobs.items():
        tokens = job.token_ids + outcome.tokens[number]
        with torch.inference_mode():
            expected = torch.log_softmax(reference(torch.tensor([tokens])).logits[0].double(), 1)
        assert sorted(outcome.rows[number]) == list(range(1, len(tokens)))
        for position, (chosen, top_ids, top) in outcome.rows[number].items():
            row = expected[position - 1]
            assert chosen == pytest.approx(row[tokens[position]].item(), abs=1e-4)
            assert top == pytest.approx(row.topk(5).values.tolist(), abs=1e-4)
            assert row[list(top_ids)].tolist() == pytest.approx(top, abs=1e-4)


def test_prompt_log_probabilities_come_with_the_chunks(tiny_llama: Path) -> None:
    settings = replace(GREEDY, prompt_logprobs=0)
    runner = Runner(load(tiny_llama, SingleRank()), SingleRank(), worker_config(), num_blocks=8)
    sequence_id = SequenceId(1)
    new = NewSequence(sequence_id, (4, 5, 6, 7), 3, settings, (0,), 0, 2)  # one token was generated before
    first = runner.execute(StepPlan(0, 0, new=(new,))).outputs[0]
    assert first.token_ids == ()
    assert first.prompt_logprobs is not None
    assert (first.prompt_logprobs.start, len(first.prompt_logprobs.chosen)) == (1, 2)
    assert (first.prompt_logprobs.num_top, first.prompt_logprobs.top) == (0, ())


@pytest.mark.parametrize(
    "adjustments",
    [
        Adjustments(logit_bias=((VOCABULARY, 1.0),)),
        Adjustments(min_tokens=1, stop_token_ids=(2**32 - 1,)),
        Adjustments(bad_words=((VOCABULARY,),)),
    ],
)
def test_an_id_outside_the_vocabulary_ends_the_step_before_anything_is_written(
    tiny_llama: Path, adjustments: Adjustments
) -> None:
    runner = Runner(load(tiny_llama, SingleRank()), SingleRank(), worker_config(), num_blocks=8)
    new = NewSequence(SequenceId(1), (4,), 1, replace(GREEDY, adjustments=adjustments), (0,), 0, 1)
    with pytest.raises(ProtocolError, match="the vocabulary has 1003"):
        runner.execute(StepPlan(0, 0, new=(new,)))
