"""Log-probabilities through chunks, preemptions and aborts: the rig compares deltas with what ranks said."""

from typing import Any

import pytest

from cluster.engine.executor import ExecutorFailed
from cluster.engine.logprobs import PromptLogprobs, token_logprobs
from cluster.engine.outputs import apply_result
from cluster.engine.scheduler import Scheduler
from cluster.generation import FinishReason, TokenLogprob
from tests.cluster.engine.rig import Rig, make_request
from tests.cluster.engine.test_outputs import planned
from workers.protocol import Logprobs, SequenceId, SequenceOutput, StepResult


def test_a_choice_says_all_of_its_prompt_with_its_first_token(depth: int) -> None:
    rig = Rig(depth=depth)
    rig.add(make_request("long", 50, 5, logprobs=2, prompt_logprobs=3, n=2))
    rig.add(make_request("one", 1, 3, prompt_logprobs=0), make_request("plain", 20, 5))
    rig.run_until_idle()
    rig.assert_nothing_left()
    assert len(rig.tokens) == 4


def test_nothing_is_lost_or_told_twice_under_pressure_for_blocks(depth: int) -> None:
    """Case 46: 8 blocks, 6 requests of 60 tokens, chunks of 16."""
    rig = Rig(depth=depth, num_blocks=8, block_size=8, max_num_batched_tokens=16)
    for number in range(6):
        rig.add(make_request(f"r{number}", 20, 40, first=number, logprobs=1, prompt_logprobs=1))
    rig.run_until_idle()
    rig.assert_nothing_left()
    assert rig.core.stats().preemptions > 0
    assert set(rig.reasons.values()) == {FinishReason.LENGTH}


def test_ranks_are_not_asked_again_for_what_has_gone_out(depth: int) -> None:
    rig = Rig(depth=depth, num_blocks=6, max_num_batched_tokens=8)
    rig.add(*(make_request(f"r{number}", 6, 12, prompt_logprobs=1) for number in range(2)))
    rig.run_until_idle()
    back = [new for plan in rig.executor.executed for new in plan.new if len(new.token_ids) > 6]
    assert back
    assert all(new.sampling.prompt_logprobs is None for new in back)


def test_what_lost_ranks_had_said_of_a_prompt_is_said_once(depth: int) -> None:
    rig = Rig(depth=depth, max_num_batched_tokens=8)
    rig.add(make_request("r", 40, 4, logprobs=0, prompt_logprobs=2))
    for _ in range(3):
        rig.turn()
    rig.lose_ranks()
    rig.resume()
    rig.run_until_idle()
    rig.assert_nothing_left()
    assert rig.reasons == {("r", 0): FinishReason.LENGTH}


@pytest.mark.parametrize("prompt_logprobs", [None, 2])
def test_a_prompt_alone_is_computed_in_chunks_and_gains_no_token(depth: int, prompt_logprobs: int | None) -> None:
    rig = Rig(depth=depth, max_num_batched_tokens=8)
    rig.add(make_request("r", 40, 0, prompt_logprobs=prompt_logprobs, n=2), make_request("s", 30, 4))
    rig.run_until_idle()
    rig.assert_nothing_left()
    assert rig.tokens[("r", 0)] == rig.tokens[("r", 1)] == []
    assert set(rig.reasons.values()) == {FinishReason.LENGTH}
    assert rig.core.stats().generation_tokens == 4


def test_an_abort_between_two_chunks_leaves_nothing(depth: int) -> None:
    rig = Rig(depth=depth, max_num_batched_tokens=8)
    rig.add(make_request("r", 40, 4, prompt_logprobs=2), make_request("s", 30, 4, prompt_logprobs=2))
    rig.turn()
    rig.turn()
    rig.abort("r")
    rig.run_until_idle()
    rig.assert_nothing_left()


def test_tokens_after_the_end_are_dropped_with_theirs() -> None:
    found = Logprobs(3, (-1.0, -2.0), 1, (7, 8), (-0.5, -0.25))
    assert token_logprobs((4,), found) == (TokenLogprob(4, -1.0, ((7, -0.5),)),)


def test_pieces_may_overlap_but_leave_no_gap() -> None:
    prompt = PromptLogprobs((5, 6, 7, 8))
    prompt.add(Logprobs(1, (-1.0, -2.0)))
    complete_after = [prompt.complete]
    prompt.add(Logprobs(1, (-1.0,)))
    prompt.add(Logprobs(2, (-2.0, -3.0)))
    complete_after.append(prompt.complete)
    assert complete_after == [False, True]
    assert prompt.take() == (
        None,
        TokenLogprob(6, -1.0, ()),
        TokenLogprob(7, -2.0, ()),
        TokenLogprob(8, -3.0, ()),
    )


@pytest.mark.parametrize("found", [Logprobs(2, (-1.0,)), Logprobs(0, (-1.0,)), Logprobs(1, (-1.0,) * 4)])
def test_pieces_that_cannot_be_are_refused(found: Logprobs) -> None:
    with pytest.raises(ValueError, match="1 of 4 are known"):
        PromptLogprobs((5, 6, 7, 8)).add(found)


def answered(scheduler: Scheduler, **told: Any) -> None:
    outputs = (SequenceOutput(SequenceId(0), (4,), **told), SequenceOutput(SequenceId(1), (4,)))
    apply_result(scheduler, StepResult(3, 0, outputs))


@pytest.mark.parametrize(
    ("sampling", "told", "message"),
    [
        ({"logprobs": 1}, {}, "0 log-probabilities for 1 tokens of sequence 0"),
        ({"logprobs": 1}, {"logprobs": Logprobs(3, ())}, "0 log-probabilities for 1 tokens of sequence 0"),
        ({}, {"logprobs": Logprobs(3, (-1.0,))}, "1 log-probabilities for 1 tokens of sequence 0"),
        ({"prompt_logprobs": 0}, {}, "sequence 0 gained a token before all of its prompt"),
        ({"prompt_logprobs": 0}, {"prompt_logprobs": Logprobs(2, (-1.0,))}, "sequence 0: .* 1 of 3 are known"),
    ],
)
def test_ranks_that_do_not_tell_what_was_asked_have_failed(
    sampling: dict[str, Any], told: dict[str, Any], message: str
) -> None:
    scheduler = planned(**sampling)
    with pytest.raises(ExecutorFailed, match=message):
        answered(scheduler, **told)
    assert all(sequence.token_ids == [1, 2, 3] for sequence in scheduler.running)
