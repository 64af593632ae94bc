"""Penalties, biases and masks against transformers' processors and OpenAI's formula, on random logits."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from tests.workers.plans import GREEDY
from workers.errors import ProtocolError
from workers.protocol import Adjustments, NewSequence, SequenceId
from workers.sampling.adjustments import adjust, check_token_ids
from workers.sampling.distribution import FloatRow

VOCABULARY = 500
NUM_PROMPT = 12


def random_logits(seed: int) -> FloatRow:
    return np.random.default_rng(seed).standard_normal(VOCABULARY, dtype=np.float32) * np.float32(4)


def random_tokens(seed: int, count: int = 40) -> list[int]:
    numbers = np.random.default_rng(seed + 100).integers(0, 60, count)  # of few ids, so that they repeat
    return [int(number) for number in numbers]


def assert_equals_transformers(
    adjustments: Adjustments, processors: LogitsProcessorList, tokens: list[int], seed: int
) -> None:
    logits = random_logits(seed)
    expected = processors(torch.LongTensor([tokens]), torch.from_numpy(logits.copy())[None])[0].numpy()
    found = adjust(logits, adjustments, tokens, NUM_PROMPT)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.3, 10.0])
def test_repetition_penalty(penalty: float) -> None:
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(penalty)])
    for seed in range(3):
        adjustments = Adjustments(repetition_penalty=penalty)
        assert_equals_transformers(adjustments, processors, random_tokens(seed), seed)


def test_logit_bias_comes_before_the_penalty() -> None:
    bias = {3: 5.0, 9: -100.0, 20: 0.25}
    processors = LogitsProcessorList(
        [
            SequenceBiasLogitsProcessor([[[token_id], value] for token_id, value in bias.items()]),
            RepetitionPenaltyLogitsProcessor(1.7),
        ]
    )
    adjustments = Adjustments(logit_bias=tuple(bias.items()), repetition_penalty=1.7)
    for seed in range(3):
        assert_equals_transformers(adjustments, processors, random_tokens(seed), seed)


@pytest.mark.parametrize("num_output", [0, 1, 4, 5, 6])
def test_min_tokens(num_output: int) -> None:
    tokens = random_tokens(1, NUM_PROMPT + num_output)
    processors = LogitsProcessorList([MinNewTokensLengthLogitsProcessor(NUM_PROMPT, 5, [7, 480])])
    adjustments = Adjustments(min_tokens=5, stop_token_ids=(7, 480))
    assert_equals_transformers(adjustments, processors, tokens, 1)


@pytest.mark.parametrize("tail", [(), (31,), (31, 32), (31, 32, 33), (44,), (32, 33)])
def test_bad_words(tail: tuple[int, ...]) -> None:
    words = [[31, 32], [31, 32, 33, 34], [44, 44], [5], [32, 33, 35]]
    tokens = [*range(NUM_PROMPT), *tail]
    processors = LogitsProcessorList([NoBadWordsLogitsProcessor(words)])
    assert_equals_transformers(Adjustments(bad_words=tuple(map(tuple, words))), processors, tokens, 2)


def test_a_bad_word_may_begin_in_the_prompt_and_be_longer_than_the_text() -> None:
    adjustments = Adjustments(bad_words=((1, 2, 3), (9, 1, 2, 4)))
    found = adjust(random_logits(0), adjustments, [1, 2], 2)
    assert np.flatnonzero(np.isinf(found)).tolist() == [3]


@pytest.mark.parametrize(("frequency", "presence"), [(0.7, 0.0), (0.0, -1.5), (2.0, 2.0), (-0.3, 0.9)])
def test_frequency_and_presence_penalty_count_the_output(frequency: float, presence: float) -> None:
    for seed in range(3):
        logits, tokens = random_logits(seed), random_tokens(seed)
        counts = np.bincount(tokens[NUM_PROMPT:], minlength=VOCABULARY)
        expected = logits - frequency * counts - presence * (counts > 0)
        adjustments = Adjustments(frequency_penalty=frequency, presence_penalty=presence)
        np.testing.assert_allclose(adjust(logits, adjustments, tokens, NUM_PROMPT), expected, rtol=0, atol=1e-5)


def test_all_at_once_in_the_order_of_the_field() -> None:
    adjustments = Adjustments(
        logit_bias=((3, 4.0), (11, -2.0)),
        repetition_penalty=1.4,
        frequency_penalty=0.5,
        presence_penalty=0.25,
        allowed_token_ids=tuple(range(0, 300, 3)),
        min_tokens=100,
        stop_token_ids=(6,),
        bad_words=((9,),),
    )
    logits, tokens = random_logits(4), random_tokens(4)
    expected = logits.astype(np.float64)
    expected[3] += 4
    expected[11] -= 2
    for token in set(tokens):
        expected[token] *= 1.4 if expected[token] < 0 else 1 / 1.4
    counts = np.bincount(tokens[NUM_PROMPT:], minlength=VOCABULARY)
    expected -= 0.5 * counts + 0.25 * (counts > 0)
    expected[[token for token in range(VOCABULARY) if token % 3 or token >= 300 or token in (6, 9)]] = -np.inf
    np.testing.assert_allclose(adjust(logits, adjustments, tokens, NUM_PROMPT), expected, rtol=0, atol=1e-5)


def test_the_row_itself_is_left_as_it_is() -> None:
    logits = random_logits(0)
    before = logits.copy()
    adjust(logits, Adjustments(repetition_penalty=2.0, allowed_token_ids=(1,)), [1, 2, 3], 1)
    assert (logits == before).all()


@pytest.mark.parametrize(
    "adjustments",
    [
        Adjustments(allowed_token_ids=(4, 5), min_tokens=9, stop_token_ids=(4, 5)),
        Adjustments(allowed_token_ids=(4,), bad_words=((4,),)),
        Adjustments(min_tokens=9, stop_token_ids=tuple(range(VOCABULARY))),
        Adjustments(bad_words=tuple((token,) for token in range(VOCABULARY))),
    ],
)
def test_a_mask_that_would_leave_nothing_is_not_applied(adjustments: Adjustments) -> None:
    found = np.isfinite(adjust(random_logits(0), adjustments, [1, 2], 2))
    assert found.sum() == len(adjustments.allowed_token_ids or range(VOCABULARY))


def new_sequence(adjustments: Adjustments, token_ids: tuple[int, ...] = (1,)) -> NewSequence:
    sampling = replace(GREEDY, adjustments=adjustments)
    return NewSequence(SequenceId(5), token_ids, 1, sampling, (0,), 0, 1)


@pytest.mark.parametrize(
    ("adjustments", "field"),
    [
        (Adjustments(logit_bias=((1, 1.0), (VOCABULARY, 1.0))), "logit_bias"),
        (Adjustments(allowed_token_ids=(VOCABULARY,)), "allowed_token_ids"),
        (Adjustments(min_tokens=1, stop_token_ids=(2**31,)), "stop_token_ids"),
        (Adjustments(bad_words=((1,), (2, VOCABULARY))), "bad_words"),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(adjustments: Adjustments, field: str) -> None:
    with pytest.raises(ProtocolError, match=f"sequence 5 names token .* in {field}; the vocabulary has 500"):
        check_token_ids(new_sequence(adjustments), VOCABULARY)


def test_tokens_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(ProtocolError, match="names token 500 in token_ids"):
        check_token_ids(new_sequence(Adjustments(), (1, VOCABULARY)), VOCABULARY)
    check_token_ids(new_sequence(Adjustments(), (VOCABULARY - 1,)), VOCABULARY)


@pytest.mark.parametrize(
    "adjustments",
    [Adjustments(allowed_token_ids=()), Adjustments(bad_words=((),)), Adjustments(repetition_penalty=0.0)],
)
def test_what_cannot_be_applied_is_refused(adjustments: Adjustments) -> None:
    with pytest.raises(ProtocolError, match="sequence 5"):
        check_token_ids(new_sequence(adjustments), VOCABULARY)
