"""A result that does not answer the plan is a failure of the ranks, and confirms nothing."""

from typing import Any

import pytest

from cluster.engine.block_pool import BlockPool
from cluster.engine.config import EngineConfig
from cluster.engine.executor import ExecutorFailed
from cluster.engine.outputs import apply_result
from cluster.engine.scheduler import Scheduler
from cluster.engine.sequence import make_sequence
from tests.cluster.engine.rig import make_request
from workers.protocol import SequenceId, SequenceOutput, StepResult


def planned(**sampling: Any) -> Scheduler:
    """Two sequences, both sampled by the plan in flight; the first with `sampling`."""
    scheduler = Scheduler(EngineConfig(max_model_len=100), BlockPool(8, 4), incarnation=3)
    for number in range(2):
        scheduler.add(
            make_sequence(
                make_request(f"r{number}", 3, 5, **({} if number else sampling)),
                0,
                sequence_id=SequenceId(number),
                seed=0,
                max_total_tokens=8,
                eos_token_ids=(),
            )
        )
    assert scheduler.schedule() is not None
    return scheduler


def outputs(*gains: tuple[int, tuple[int, ...]]) -> tuple[SequenceOutput, ...]:
    return tuple(SequenceOutput(SequenceId(number), token_ids) for number, token_ids in gains)


def test_a_result_in_any_order_of_rows() -> None:
    deltas = apply_result(planned(), StepResult(3, 0, outputs((1, (5,)), (0, (4,)))))
    assert [(delta.request_id, delta.token_ids) for delta in deltas] == [("r0", (4,)), ("r1", (5,))]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (StepResult(2, 0, outputs((0, (4,)), (1, (4,)))), "step 2/0 where 3/0 was due"),
        (StepResult(3, 1, outputs((0, (4,)), (1, (4,)))), "step 3/1 where 3/0 was due"),
        (StepResult(3, 0, outputs((0, (4,)))), r"none for \[1\]"),
        (StepResult(3, 0, outputs((0, (4,)), (1, ()))), r"none for \[1\]"),
        (StepResult(3, 0, outputs((0, (4,)), (1, (4,)), (2, (4,)))), "3 sequences gained tokens, 2 should"),
    ],
)
def test_a_result_that_does_not_answer_the_plan(result: StepResult, message: str) -> None:
    scheduler = planned()
    with pytest.raises(ExecutorFailed, match=message):
        apply_result(scheduler, result)
    assert all(sequence.token_ids == [1, 2, 3] for sequence in scheduler.running)
