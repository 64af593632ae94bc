"""Log-probabilities against torch's log_softmax, ties, and extreme rows."""

import numpy as np
import pytest
import torch

from workers.sampling.logprobs import TokenScore, columns, score


@pytest.mark.parametrize("scale", [0.01, 3.0, 50.0])
def test_equals_log_softmax(scale: float) -> None:
    logits = np.random.default_rng(0).standard_normal(49_152, dtype=np.float32) * np.float32(scale)
    expected = torch.log_softmax(torch.from_numpy(logits).double(), 0)
    top = torch.topk(expected, 20)
    for token_id in (0, 77, int(top.indices[0])):
        found = score(logits, token_id, 20)
        assert found.logprob == pytest.approx(expected[token_id].item(), abs=1e-5, rel=1e-6)
        assert [each for each, _ in found.top] == top.indices.tolist()
        assert [logprob for _, logprob in found.top] == pytest.approx(top.values.tolist(), abs=1e-5, rel=1e-6)


def test_ties_rank_by_id() -> None:
    logits = np.zeros(100, dtype=np.float32)
    logits[60] = 1.0
    assert [token_id for token_id, _ in score(logits, 3, 4).top] == [60, 0, 1, 2]


def test_no_alternatives_and_more_than_there_are() -> None:
    logits = np.array([1.0, 2.0, 0.0], dtype=np.float32)
    assert score(logits, 0, 0).top == ()
    assert [token_id for token_id, _ in score(logits, 0, 20).top] == [1, 0, 2]


def test_huge_logits_and_impossible_tokens() -> None:
    logits = np.array([3e38, -np.inf, 0.0], dtype=np.float32)
    assert score(logits, 0, 1) == TokenScore(0.0, ((0, 0.0),))
    assert score(logits, 1, 0).logprob == -np.inf


def test_what_was_masked_in_a_row_does_not_count() -> None:
    assert score(np.array([0.0, 0.0, -np.inf], dtype=np.float32), 0, 0).logprob == pytest.approx(np.log(0.5))


def test_columns_lay_rows_one_after_the_other() -> None:
    found = columns(7, [TokenScore(-1.0, ((3, -0.5), (4, -2.0))), TokenScore(-3.0, ((9, -0.25), (1, -4.0)))])
    assert (found.start, found.chosen, found.num_top) == (7, (-1.0, -3.0), 2)
    assert (found.top_ids, found.top) == ((3, 4, 9, 1), (-0.5, -2.0, -0.25, -4.0))
