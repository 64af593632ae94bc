"""The mirror follows plans and results, and refuses what cannot be."""

from typing import Any

import pytest

from tests.workers.plans import GREEDY, worker_config
from workers.errors import ProtocolError
from workers.protocol import KnownSequence, NewSequence, SequenceId, StepPlan
from workers.sequences import SequenceMirror


def make_mirror(**settings: Any) -> SequenceMirror:
    return SequenceMirror(worker_config(**{"block_size": 4, "max_model_len": 16, **settings}), num_blocks=10)


def new(sequence_id: int = 1, **changes: Any) -> NewSequence:
    fields: dict[str, Any] = {
        "sequence_id": SequenceId(sequence_id),
        "token_ids": (5, 6, 7),
        "num_prompt_tokens": 3,
        "sampling": GREEDY,
        "blocks": (4,),
        "num_computed_tokens": 0,
        "num_new_tokens": 3,
    }
    return NewSequence(**{**fields, **changes})


def known(sequence_id: int = 1, num_new_tokens: int = 1, new_blocks: tuple[int, ...] = ()) -> KnownSequence:
    return KnownSequence(SequenceId(sequence_id), num_new_tokens, new_blocks)


def plan(*, added: Any = (), continued: Any = (), ended: Any = ()) -> StepPlan:
    return StepPlan(0, 8, tuple(added), tuple(continued), tuple(SequenceId(number) for number in ended))


def test_a_life() -> None:
    mirror = make_mirror()
    first = mirror.apply(plan(added=[new(num_new_tokens=2)]))
    assert [(entry.start, entry.end, entry.samples) for entry in first] == [(0, 2, False)]
    mirror.advance(first, [])
    last_chunk = mirror.apply(plan(continued=[known()]))
    assert [(entry.start, entry.end, entry.samples) for entry in last_chunk] == [(2, 3, True)]
    mirror.advance(last_chunk, [(8,)])
    for token_id in (9, 10):
        decode = mirror.apply(plan(continued=[known(new_blocks=(6,) if token_id == 10 else ())]))
        mirror.advance(decode, [(token_id,)])
    sequence = mirror[SequenceId(1)]
    assert (sequence.token_ids.tolist(), sequence.blocks, sequence.num_computed) == (
        [5, 6, 7, 8, 9, 10],
        [4, 6],
        5,
    )
    assert mirror.apply(plan(ended=[1])) == []
    assert len(mirror) == 0


def test_an_id_may_come_back_in_the_plan_that_ends_it() -> None:
    mirror = make_mirror()
    mirror.advance(mirror.apply(plan(added=[new()])), [(8,)])
    back = mirror.apply(plan(ended=[1], added=[new(token_ids=(5, 6, 7, 8), num_new_tokens=4)]))
    assert [entry.sequence.token_ids.tolist() for entry in back] == [[5, 6, 7, 8]]


def test_a_prefix_hit_starts_where_it_ends() -> None:
    (entry,) = make_mirror().apply(plan(added=[new(num_computed_tokens=2, num_new_tokens=1)]))
    assert (entry.start, entry.end, entry.samples) == (2, 3, True)


def test_several_tokens_a_step_can_be_recorded() -> None:
    mirror = make_mirror()
    mirror.advance(mirror.apply(plan(added=[new()])), [(8, 9)])
    assert mirror[SequenceId(1)].token_ids.tolist() == [5, 6, 7, 8, 9]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (plan(ended=[3]), r"step 8 ends sequence 3, which is not live"),
        (plan(continued=[known(3)]), r"step 8 continues sequence 3, which is not live"),
        (plan(added=[new(1)]), r"step 8 adds sequence 1, which is live here already"),
        (plan(added=[new(2), new(2)]), r"step 8 adds sequence 2, which is live here already"),
        (plan(continued=[known(), known()]), r"step 8 names a sequence twice"),
        (plan(continued=[known(num_new_tokens=0)]), r"sequence 1 cannot compute 0 tokens"),
        (plan(continued=[known(num_new_tokens=2)]), r"cannot compute 2 tokens: 3 of its 4 are computed"),
        (plan(continued=[known(new_blocks=(10,))]), r"blocks \[10\]; there are 10"),
        (plan(continued=[known(new_blocks=(-1,))]), r"blocks \[-1\]; there are 10"),
        (plan(added=[new(2, blocks=(1, 10))]), r"blocks \[1, 10\]; there are 10"),
        (plan(added=[new(2, token_ids=())]), r"sequence 2 has 0 tokens"),
        (plan(added=[new(2, num_prompt_tokens=4)]), r"sequence 2 has 3 tokens, 4 of them prompt"),
        (plan(added=[new(2, num_prompt_tokens=0)]), r"sequence 2 has 3 tokens, 0 of them prompt"),
        (plan(added=[new(2, num_computed_tokens=3)]), r"sequence 2 has 3 tokens, 3 of them computed"),
        (plan(added=[new(2, num_new_tokens=4)]), r"cannot compute 4 tokens: 0 of its 3 are computed"),
        (plan(added=[new(2, blocks=())]), r"would have 3 tokens in 0 blocks, which hold 0"),
        (
            plan(added=[new(2, token_ids=(1,) * 17, blocks=(1, 2, 3, 5, 6), num_new_tokens=17)]),
            r"would have 17 tokens, above max_model_len 16",
        ),
        (plan(added=[new(2), new(3), new(4)]), r"step 8 has 3 sequences, above max_num_seqs 2"),
        (
            plan(added=[new(2, token_ids=(1,) * 9, blocks=(1, 2, 3), num_new_tokens=9)]),
            r"step 8 has 9 tokens, above max_num_batched_tokens 8",
        ),
    ],
)
def test_nonsense_is_refused(bad: StepPlan, message: str) -> None:
    mirror = make_mirror(max_num_seqs=2, max_num_batched_tokens=8)
    mirror.advance(mirror.apply(plan(added=[new()])), [(8,)])
    with pytest.raises(ProtocolError, match=message):
        mirror.apply(bad)


def test_blocks_must_cover_the_next_token() -> None:
    mirror = make_mirror()
    mirror.advance(mirror.apply(plan(added=[new()])), [(8,)])
    mirror.advance(mirror.apply(plan(continued=[known()])), [(9,)])
    with pytest.raises(ProtocolError, match=r"would have 5 tokens in 1 blocks, which hold 4"):
        mirror.apply(plan(continued=[known()]))
