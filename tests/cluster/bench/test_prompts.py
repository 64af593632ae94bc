"""Prompts: length by words, no shared prefix, length found from trials."""

import pytest

from cluster.bench.prompts import random_words, words_for_tokens


def test_same_seed_and_index_give_the_same_words() -> None:
    assert random_words(7, 3, 20) == random_words(7, 3, 20)
    assert random_words(7, 3, 20) != random_words(8, 3, 20)


def test_no_two_prompts_share_a_block() -> None:
    heads = {tuple(random_words(1, index, 64).split()[:8]) for index in range(500)}
    assert len(heads) == 500


def test_length_is_in_words() -> None:
    assert len(random_words(1, 0, 137).split()) == 137
    with pytest.raises(ValueError, match="at least 1 word"):
        random_words(1, 0, 0)


@pytest.mark.parametrize(("per_word", "fixed"), [(1, 0), (1, 1), (2, 7), (1.25, 3)])
def test_words_are_found_from_two_trials(per_word: float, fixed: int) -> None:
    trials = [(words, round(per_word * words) + fixed) for words in (32, 64)]
    words = words_for_tokens(128, trials)
    assert round(per_word * words) + fixed == pytest.approx(128, abs=1)


def test_without_usage_a_word_is_a_token() -> None:
    assert words_for_tokens(128, [(32, 0), (64, 0)]) == 128
    assert words_for_tokens(128, []) == 128


def test_a_prompt_has_at_least_one_word() -> None:
    assert words_for_tokens(1, [(1, 30), (2, 31)]) == 1
