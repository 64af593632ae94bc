"""Finish rules and state transitions of one sequence."""

from typing import Any

import pytest

from cluster.engine.sequence import TRANSITIONS, Sequence, SequenceState, make_sequence
from cluster.generation import FinishReason
from tests.cluster.engine.rig import make_request
from workers.protocol import SequenceId


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
