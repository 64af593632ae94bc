"""Finish rules and state transitions of one sequence."""

from typing import Any

import pytest

from cluster.engine.sequence import TRANSITIONS, Sequence, SequenceState, make_sequence
from cluster.generation import FinishReason
from tests.cluster.engine.rig import make_request
from workers.protocol import Adjustments, SequenceId


def sequence_of(max_total_tokens: int = 10, **sampling: Any) -> Sequence:
    return make_sequence(
        make_request("r", 3, 5, **sampling),
        1,
        sequence_id=SequenceId(7),
        seed=11,
        max_total_tokens=max_total_tokens,
        eos_token_ids=(99,),
    )


def test_sequence_starts_with_its_prompt_and_its_draws() -> None:
    sequence = sequence_of(temperature=0.5, top_k=3, top_p=0.9)
    assert sequence.token_ids == [1, 2, 3]
    assert sequence.num_tokens_left_to_compute == 3
    assert (sequence.sampling.seed, sequence.sampling.choice) == (11, 1)
    assert (sequence.sampling.temperature, sequence.sampling.top_k, sequence.sampling.top_p) == (0.5, 3, 0.9)


def test_a_chunk_does_not_sample_and_the_last_one_does() -> None:
    sequence = sequence_of()
    assert not sequence.advance(2)
    assert sequence.advance(1)
    assert (sequence.num_computed_tokens, sequence.num_pending_tokens) == (3, 1)
    assert sequence.num_tokens_left_to_compute == 1


def test_a_pending_token_can_be_computed_before_it_is_known() -> None:
    sequence = sequence_of()
    sequence.advance(3)
    assert sequence.advance(1)
    assert sequence.num_pending_tokens == 2
    assert sequence.accept((4,)) == ((4,), None)
    assert sequence.accept((5,)) == ((5,), None)
    assert sequence.token_ids == [1, 2, 3, 4, 5]
    assert sequence.num_tokens_left_to_compute == 1


@pytest.mark.parametrize(
    ("sampling", "token", "reason"),
    [
        ({}, 99, FinishReason.STOP),
        ({"ignore_eos": True}, 99, None),
        ({"stop_token_ids": (50,)}, 50, FinishReason.STOP),
        ({"stop_token_ids": (50,)}, 99, FinishReason.STOP),
        ({"stop_token_ids": (50,), "ignore_eos": True}, 50, FinishReason.STOP),
        ({}, 50, None),
    ],
)
def test_stop_tokens(sampling: dict[str, Any], token: int, reason: FinishReason | None) -> None:
    sequence = sequence_of(**sampling)
    sequence.advance(3)
    assert sequence.accept((token,)) == ((token,), reason)


def test_a_stop_token_ends_it_only_after_min_tokens() -> None:
    sequence = sequence_of(min_tokens=2)
    sequence.advance(3)
    assert sequence.accept((99,)) == ((99,), None)
    assert sequence.accept((99,)) == ((99,), None)
    assert sequence.accept((99,)) == ((99,), FinishReason.STOP)


def test_ranks_are_told_what_is_asked_for() -> None:
    asked: dict[str, Any] = {
        "logit_bias": ((4, 1.5),),
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "allowed_token_ids": (4, 5),
    }
    sampling = sequence_of(**asked, min_p=0.1, logprobs=3, prompt_logprobs=0).sampling
    assert sampling.adjustments == Adjustments(**asked)
    assert (sampling.min_p, sampling.logprobs, sampling.prompt_logprobs) == (0.1, 3, 0)


@pytest.mark.parametrize(
    ("sampling", "adjustments"),
    [
        ({}, None),
        ({"stop_token_ids": (50,), "min_p": 0.3}, None),
        ({"min_tokens": 2}, Adjustments(min_tokens=2, stop_token_ids=(99,))),
        ({"min_tokens": 2, "stop_token_ids": (50,)}, Adjustments(min_tokens=2, stop_token_ids=(50, 99))),
        ({"min_tokens": 2, "ignore_eos": True}, None),
    ],
)
def test_ranks_learn_of_stops_only_to_avoid_them(
    sampling: dict[str, Any], adjustments: Adjustments | None
) -> None:
    assert sequence_of(**sampling).sampling.adjustments == adjustments


def test_length_ends_it_and_a_stop_token_at_the_limit_is_a_stop() -> None:
    sequence = sequence_of(max_total_tokens=4)
    sequence.advance(3)
    assert sequence.last_token_is_pending
    assert sequence.accept((8,)) == ((8,), FinishReason.LENGTH)
    other = sequence_of(max_total_tokens=4)
    other.advance(3)
    assert other.accept((99,)) == ((99,), FinishReason.STOP)


def test_tokens_after_the_end_are_dropped() -> None:
    sequence = sequence_of()
    sequence.advance(3)
    assert sequence.accept((4, 99, 5)) == ((4, 99), FinishReason.STOP)
    assert sequence.token_ids == [1, 2, 3, 4, 99]


def test_only_the_transitions_of_the_table_are_possible() -> None:
    for start in SequenceState:
        for end in SequenceState:
            sequence = sequence_of()
            sequence.state = start
            if end in TRANSITIONS[start]:
                sequence.become(end)
                assert sequence.state is end
            else:
                with pytest.raises(AssertionError):
                    sequence.become(end)
