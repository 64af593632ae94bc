"""Filters against transformers' processors, ties, and the drawn distribution."""

import numpy as np
import pytest
import torch
from torch import softmax
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from workers.sampling.distribution import FloatRow, allowed_ids, draw, greatest
from workers.sampling.randomness import uniform

VOCABULARY = 3000


def random_logits(seed: int, scale: float = 3.0) -> FloatRow:
    return np.random.default_rng(seed).standard_normal(VOCABULARY, dtype=np.float32) * np.float32(scale)


def kept_by_transformers(
    logits: FloatRow, temperature: float, top_k: int, top_p: float, min_p: float = 0.0
) -> list[int]:
    processors = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        processors.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        processors.append(TopPLogitsWarper(top_p))
    if min_p:
        processors.append(MinPLogitsWarper(min_p))
    scores = processors(torch.LongTensor([[0]]), torch.from_numpy(logits)[None].double())
    return scores[0].isfinite().nonzero().squeeze(1).tolist()


@pytest.mark.parametrize("temperature", [0.2, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [0, 1, 2, 50, 700, VOCABULARY, VOCABULARY + 1])
@pytest.mark.parametrize("top_p", [1.0, 0.999, 0.9, 0.5, 1e-6])
def test_filters_keep_what_transformers_keeps(temperature: float, top_k: int, top_p: float) -> None:
    for seed in range(3):
        logits = random_logits(seed)
        kept = allowed_ids(logits, temperature=temperature, top_k=top_k, top_p=top_p)
        found = list(range(VOCABULARY)) if kept is None else kept.tolist()
        assert found == kept_by_transformers(logits, temperature, top_k, top_p)


@pytest.mark.parametrize("temperature", [0.2, 1.0, 2.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (50, 1.0), (0, 0.9), (700, 0.5)])
@pytest.mark.parametrize("min_p", [1e-4, 0.05, 0.5, 1.0])
def test_min_p_keeps_what_transformers_keeps(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    for seed in range(3):
        logits = random_logits(seed)
        kept = allowed_ids(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        assert kept is not None
        assert kept.tolist() == kept_by_transformers(logits, temperature, top_k, top_p, min_p)


def test_min_p_of_one_keeps_all_that_tie_with_the_greatest() -> None:
    logits = np.zeros(20, dtype=np.float32)
    logits[[4, 17]] = 2.5
    kept = allowed_ids(logits, temperature=0.7, top_k=0, top_p=1.0, min_p=1.0)
    assert kept is not None
    assert kept.tolist() == [4, 17]


def test_a_flat_distribution_needs_more_than_the_first_candidates() -> None:
    logits = random_logits(5, scale=0.01)
    kept = allowed_ids(logits, temperature=1.0, top_k=0, top_p=0.7)
    assert kept is not None
    assert kept.tolist() == kept_by_transformers(logits, 1.0, 0, 0.7)
    assert 2000 < len(kept) < 2200


def test_ties_rank_by_id() -> None:
    logits = np.zeros(1000, dtype=np.float32)
    logits[700] = 1.0
    kept = allowed_ids(logits, temperature=1.0, top_k=3, top_p=1.0)
    assert kept is not None
    assert kept.tolist() == [0, 1, 700]
    nucleus = allowed_ids(logits, temperature=1.0, top_k=0, top_p=0.1)
    assert nucleus is not None
    assert nucleus.tolist() == [*range(len(nucleus) - 1), 700]
    assert 90 < len(nucleus) < 105


@pytest.mark.parametrize("size", [1, 31, 32, 33, 1000, 5003])
@pytest.mark.parametrize("levels", [2, 50, 10**6])
def test_the_greatest_are_found_with_ties_by_id(size: int, levels: int) -> None:
    logits = np.random.default_rng(size).integers(0, levels, size).astype(np.float32)
    for order in (logits, np.sort(logits), np.sort(logits)[::-1].copy()):
        ranked = sorted(range(size), key=lambda each, row=order: (-row[each], each))  # type: ignore[misc]
        for count in {1, 2, 20, 31, 156, 157, size}:
            if count <= size:
                assert greatest(order, count).tolist() == ranked[:count]


def test_top_k_of_one_is_the_lowest_id_of_the_greatest() -> None:
    logits = random_logits(0)
    logits[[17, 4]] = 50.0
    assert {draw(logits, u, temperature=2.0, top_k=1, top_p=1.0) for u in (0.0, 0.5, 1 - 2**-53)} == {4}


@pytest.mark.parametrize("u", [0.0, 0.37, 1 - 2**-53])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (0, 0.9), (5, 1.0)])
def test_what_is_masked_is_never_drawn(u: float, top_k: int, top_p: float) -> None:
    logits = np.full(100, -np.inf, dtype=np.float32)
    logits[40:43] = 0.0
    token_id = draw(logits, u, temperature=1.0, top_k=top_k, top_p=top_p)
    assert token_id == 40 + int(u * 3)


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-6, 1e6])
def test_extreme_temperatures_do_not_overflow(temperature: float) -> None:
    logits = random_logits(1)
    greatest = int(logits.argmax())
    token_id = draw(logits, 0.5, temperature=temperature, top_k=0, top_p=1.0)
    assert token_id == greatest if temperature < 1 else abs(token_id - VOCABULARY / 2) < 5


@pytest.mark.parametrize("temperature", [0.6, 1.3])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(0, 1.0, 0.0), (6, 1.0, 0.0), (0, 0.8, 0.0), (9, 0.9, 0.0), (0, 1.0, 0.2), (12, 0.95, 0.1)],
)
def test_draws_follow_the_distribution(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    logits = random_logits(3, scale=1.0)[:16]
    num_draws = 10_000
    kept = kept_by_transformers(logits, temperature, top_k, top_p, min_p)
    assert 1 < len(kept) <= 16
    expected = softmax(torch.from_numpy(logits[kept]).double() / temperature, 0).numpy() * num_draws
    drawn = [
        draw(logits, uniform(7, 0, position), temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        for position in range(num_draws)
    ]
    counts = np.bincount(drawn, minlength=16)
    assert counts.sum() == counts[kept].sum()
    chi_square = ((counts[kept] - expected) ** 2 / expected).sum()
    assert chi_square < 45  # up to 15 degrees of freedom: p < 0.0001
