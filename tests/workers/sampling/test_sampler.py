"""One id a row, equal on every rank, whatever else is in the batch; on thread ranks with uneven vocabularies."""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from model_shards.group import SingleRank
from tests.fakes.thread_group import ThreadGroup, run_ranks
from workers.errors import WorkerError
from workers.protocol import Adjustments, SamplingSettings
from workers.sampling.sampler import Draw, Question, Sampler, Samples
from workers.staging import Readback

T = TypeVar("T")
VOCABULARY = 1003
ON_CPU = Readback(torch.device("cpu"), deadline_s=60.0)
SHARDS = {1: [1003], 2: [512, 491], 3: [384, 384, 235], 4: [501, 0, 1, 501]}


def settings(temperature: float, seed: int = 0, top_k: int = 0, top_p: float = 1.0) -> SamplingSettings:
    return SamplingSettings(temperature, top_k, top_p, seed, 0)


def on_ranks(num_ranks: int, logits: Tensor, ask: Callable[[Sampler, Tensor], T]) -> list[T]:
    """What `ask` gives on each rank, with the rank's sampler and its columns of `logits`."""
    sizes = SHARDS[num_ranks]

    def work(group: ThreadGroup) -> T:
        start, size = sum(sizes[: group.rank]), sizes[group.rank]
        sampler = Sampler(group, ON_CPU, vocab_size=VOCABULARY, local_start=start, local_size=size)
        return ask(sampler, logits[:, start : start + size].contiguous())

    return run_ranks(num_ranks, work)


def samples_on(num_ranks: int, logits: Tensor, draws: list[Draw]) -> list[Samples]:
    return on_ranks(num_ranks, logits, lambda sampler, columns: sampler.sample(columns, draws))


def sample_on(num_ranks: int, logits: Tensor, draws: list[Draw]) -> list[list[int]]:
    return [samples.token_ids for samples in samples_on(num_ranks, logits, draws)]


def random_logits(rows: int) -> Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(2)) * 2


@pytest.mark.parametrize("num_ranks", SHARDS)
def test_every_rank_has_the_ids_of_one_rank(num_ranks: int) -> None:
    logits = random_logits(24)
    draws = [
        Draw(settings(0.0 if row % 3 == 0 else 0.9, seed=row, top_k=40 * (row % 2), top_p=1 - row % 4 / 10), row)
        for row in range(24)
    ]
    (expected,) = sample_on(1, logits, draws)
    assert sample_on(num_ranks, logits, draws) == [expected] * num_ranks
    assert [expected[row] for row in range(0, 24, 3)] == logits[::3].argmax(1).tolist()


@pytest.mark.parametrize("num_ranks", SHARDS)
def test_greedy_ties_go_to_the_lowest_id(num_ranks: int) -> None:
    logits = random_logits(3)
    for row, ids in enumerate(([1002, 20], [500, 501, 1002], [600, 400])):
        logits[row, ids] = 99.0
    draws = [Draw(settings(0.0), 5)] * 3
    assert sample_on(num_ranks, logits, draws) == [[20, 500, 400]] * num_ranks


@pytest.mark.parametrize("num_ranks", SHARDS)
def test_greedy_rows_of_minus_infinity_but_one(num_ranks: int) -> None:
    logits = torch.full((1, VOCABULARY), -torch.inf)
    logits[0, 1002] = -1e30
    assert sample_on(num_ranks, logits, [Draw(settings(0.0), 0)]) == [[1002]] * num_ranks


def adjusted_draws() -> list[Draw]:
    """Greedy and drawn rows, plain and adjusted, some of which ask for log-probabilities."""
    adjustments = Adjustments(
        repetition_penalty=1.5, frequency_penalty=0.7, logit_bias=((5, 3.0),), bad_words=((40, 41),), min_tokens=99
    )
    return [
        Draw(
            replace(
                settings(0.8 * (row % 2), seed=row),
                min_p=0.02 * (row % 3),
                adjustments=adjustments if row % 4 < 2 else None,
                logprobs=row if row % 5 < 3 else None,
            ),
            20,
            list(range(30 + row, 50 + row)),
            8,
        )
        for row in range(16)
    ]


@pytest.mark.parametrize("num_ranks", SHARDS)
def test_adjusted_rows_and_scores_are_those_of_one_rank(num_ranks: int) -> None:
    logits, draws = random_logits(16), adjusted_draws()
    (expected,) = samples_on(1, logits, draws)
    assert sorted(expected.scores) == [row for row in range(16) if row % 5 < 3]
    first, *others = samples_on(num_ranks, logits, draws)
    assert first == expected
    assert all(samples == Samples(expected.token_ids, {}) for samples in others)


def test_adjusted_rows_and_scores_are_the_same_in_any_batch() -> None:
    logits, draws = random_logits(16), adjusted_draws()
    (together,) = samples_on(1, logits, draws)
    for row, item in enumerate(draws):
        (alone,) = samples_on(1, logits[row : row + 1], [item])
        assert alone.token_ids == [together.token_ids[row]]
        assert alone.scores.get(0) == together.scores.get(row)


@pytest.mark.parametrize("num_ranks", SHARDS)
def test_greedy_chooses_the_greatest_after_adjustment(num_ranks: int) -> None:
    logits = random_logits(2)
    best, second = logits[0].topk(2).indices.tolist()
    adjustments = Adjustments(logit_bias=((best, -100.0),))
    draws = [Draw(replace(settings(0.0), adjustments=adjustments, logprobs=1), 1, [3], 1), Draw(settings(0.0), 1)]
    samples = samples_on(num_ranks, logits, draws)
    assert all(each.token_ids == [second, int(logits[1].argmax())] for each in samples)
    # Log-probabilities are of the model's own distribution, in which the other token was likelier.
    raw = torch.log_softmax(logits[0], 0)
    assert samples[0].scores[0].logprob == pytest.approx(raw[second].item(), abs=1e-5)
    ((token_id, logprob),) = samples[0].scores[0].top
    assert token_id == best
    assert logprob == pytest.approx(raw[best].item(), abs=1e-5)


@pytest.mark.parametrize("num_ranks", SHARDS)
def test_known_tokens_are_scored_on_rank_0(num_ranks: int) -> None:
    logits = random_logits(3)
    questions = [Question(0, 0), Question(1002, 2), Question(500, 20)]
    first, *others = on_ranks(num_ranks, logits, lambda sampler, columns: sampler.score(columns, questions))
    raw = torch.log_softmax(logits, 1)
    for row, (item, found) in enumerate(zip(questions, first, strict=True)):
        assert found.logprob == pytest.approx(raw[row, item.token_id].item(), abs=1e-5)
        assert [token_id for token_id, _ in found.top] == raw[row].topk(item.num_top).indices.tolist()
    assert all(scores == [] for scores in others)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_padding_of_narrow_shards_is_never_drawn(num_ranks: int) -> None:
    logits = torch.full((200, VOCABULARY), -50.0)  # flat: any id, with padding any place, is as likely as another
    draws = [Draw(settings(2.0, seed=row), row) for row in range(200)]
    (expected,) = sample_on(1, logits, draws)
    assert sample_on(num_ranks, logits, draws)[0] == expected
    assert max(expected) < VOCABULARY
    assert max(expected) > 950


def test_a_row_is_drawn_alike_in_any_batch() -> None:
    logits = random_logits(9)
    draws = [Draw(settings(1.0, seed=row), 10 + row) for row in range(8)] + [Draw(settings(0.0), 3)]
    sampler = Sampler(SingleRank(), ON_CPU, vocab_size=VOCABULARY, local_start=0, local_size=VOCABULARY)
    together = sampler.sample(logits, draws).token_ids
    alone = [sampler.sample(logits[row : row + 1], [draws[row]]).token_ids[0] for row in range(9)]
    backwards = sampler.sample(logits.flip(0), draws[::-1]).token_ids[::-1]
    assert together == alone == backwards


def test_position_seed_and_choice_each_change_the_draw() -> None:
    logits = torch.zeros(4, VOCABULARY)
    draws = [
        Draw(SamplingSettings(1.0, 0, 1.0, seed, choice), position)
        for seed, choice, position in ((1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0))
    ]
    sampler = Sampler(SingleRank(), ON_CPU, vocab_size=VOCABULARY, local_start=0, local_size=VOCABULARY)
    assert len(set(sampler.sample(logits, draws).token_ids)) == 4


def test_no_rows_are_no_collective() -> None:
    sampler = Sampler(SingleRank(), ON_CPU, vocab_size=4, local_start=0, local_size=4)
    assert sampler.sample(torch.empty(0, 4), []).token_ids == []


@pytest.mark.parametrize(("start", "size"), [(0, 3), (1, 4), (0, 5)])
def test_shards_that_do_not_cover_the_vocabulary_are_refused(start: int, size: int) -> None:
    with pytest.raises(WorkerError, match="do not cover 4 ids"):
        Sampler(SingleRank(), ON_CPU, vocab_size=4, local_start=start, local_size=size)
