"""Case 28: a vocabulary that no number of ranks divides. What pads a narrower shard is never chosen nor scored."""

from pathlib import Path

import pytest

from tests.fakes.checkpoints import write_tiny_llama
from tests.fakes.thread_group import ThreadGroup, run_ranks
from tests.workers.plans import GREEDY, Job
from tests.workers.test_runner_sampling import Outcome, generate, load
from workers.protocol import SamplingSettings

VOCABULARY = 1003
TOKENS = 40
NUM_TOP = 20


def jobs() -> dict[int, Job]:
    """Nearly flat distributions over the whole vocabulary, and greedy ones, all with log-probabilities."""
    hot = {
        number: SamplingSettings(5.0, VOCABULARY, 1.0, seed=number, choice=0, logprobs=NUM_TOP)
        for number in range(6)
    }
    return {number: Job([3 + number, 77], TOKENS, sampling=settings) for number, settings in hot.items()} | {
        9: Job([5, 6], TOKENS, sampling=GREEDY)
    }


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_no_id_beyond_the_vocabulary_is_ever_seen(tmp_path: Path, ranks: int) -> None:
    folder = write_tiny_llama(tmp_path)

    def work(group: ThreadGroup) -> Outcome:
        return generate(load(folder, group), group, jobs())

    whole = run_ranks(1, work)[0]
    outcomes = run_ranks(ranks, work)
    assert all(outcome.tokens == whole.tokens for outcome in outcomes)
    drawn = {token for tokens in whole.tokens.values() for token in tokens}
    assert max(drawn) < VOCABULARY
    assert len(drawn) > 100, "hot enough that padding would have been drawn"
    rows = [row for known in outcomes[0].rows.values() for row in known.values()]
    assert rows
    for _, top_ids, top in rows:
        assert len(set(top_ids)) == NUM_TOP
        assert max(top_ids) < VOCABULARY
        assert min(top) > -30.0, "padding is minus infinity"
