"""The fake must refuse what ranks must refuse, or the tests that use it prove nothing."""

import pytest

from cluster.engine.executor import Capacity, ExecutorFailed
from tests.fakes.scripted_executor import BadPlan, ScriptedExecutor
from workers.protocol import KnownSequence, NewSequence, SamplingSettings, SequenceId, StepPlan

A, B = SequenceId(0), SequenceId(1)
GREEDY = SamplingSettings(temperature=0.0, top_k=0, top_p=1.0, seed=0, choice=0)


def new(sequence_id: SequenceId, blocks: tuple[int, ...], num_new_tokens: int = 3) -> NewSequence:
    return NewSequence(sequence_id, (1, 2, 3), 3, GREEDY, blocks, 0, num_new_tokens)


def run(*plans: StepPlan) -> ScriptedExecutor:
    executor = ScriptedExecutor(Capacity(4, 2), max_num_seqs=2, max_num_batched_tokens=4)
    for plan in plans:
        executor.submit(plan)
        executor.take_result(1.0)
    return executor


START = StepPlan(0, 0, new=(new(A, (0, 1)),))


def test_it_counts() -> None:
    executor = run(START)
    executor.submit(StepPlan(0, 1, known=(KnownSequence(A, 1),)))
    result = executor.take_result(1.0)
    assert [output.token_ids for output in result.outputs] == [(5,)]
    executor.submit(StepPlan(0, 2, ended=(A,)))
    assert executor.take_result(1.0).outputs == ()
    assert executor.mirror == {}


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (StepPlan(1, 1), "incarnation"),
        (StepPlan(0, 2), "step 2 where 1 is due"),
        (StepPlan(0, 1, ended=(B,)), "ended sequence 1 is not held"),
        (StepPlan(0, 1, new=(new(A, (2, 3)),)), "new sequence 0 is held already"),
        (StepPlan(0, 1, new=(new(B, (1, 2)),)), "block 1 of 1 is held by another"),
        (StepPlan(0, 1, new=(new(B, (2, 4)),)), "block 4 does not exist"),
        (StepPlan(0, 1, new=(new(B, (2,)),)), "lacks blocks"),
        (StepPlan(0, 1, new=(new(B, (2, 3), 0),)), "computes 0 tokens"),
        (StepPlan(0, 1, new=(new(B, (2, 3), 4),)), "has 3 tokens"),
        (StepPlan(0, 1, known=(KnownSequence(B, 1),)), "known sequence 1 is not held"),
        (StepPlan(0, 1, known=(KnownSequence(A, 2),)), "has 4 tokens"),
        (StepPlan(0, 1, known=(KnownSequence(A, 1), KnownSequence(A, 1))), "in the plan twice"),
        (StepPlan(0, 1, new=(new(B, (2, 3), 4),), known=(KnownSequence(A, 1),)), "5 tokens in a step"),
    ],
)
def test_it_refuses(plan: StepPlan, message: str) -> None:
    with pytest.raises(BadPlan, match=message):
        run(START, plan)


def test_it_sees_a_slot_that_was_never_written() -> None:
    skipped = NewSequence(A, (1, 2, 3), 3, GREEDY, (0, 1), 2, 1)
    with pytest.raises(BadPlan, match="slot 0 holds None"):
        run(StepPlan(0, 0, new=(skipped,)))


def test_it_takes_two_plans_at_the_most() -> None:
    executor = run()
    executor.submit(StepPlan(0, 0))
    executor.submit(StepPlan(0, 1))
    with pytest.raises(BadPlan, match="2 plans are in flight"):
        executor.submit(StepPlan(0, 2))


def test_it_dies_and_hangs_as_told() -> None:
    executor = ScriptedExecutor(Capacity(4, 2), die_at_step=0, die_on_submit=1)
    executor.submit(StepPlan(0, 0))
    with pytest.raises(ExecutorFailed, match="cannot send step 1"):
        executor.submit(StepPlan(0, 1))
    with pytest.raises(ExecutorFailed, match="died in step 0"):
        executor.take_result(1.0)
    slow = ScriptedExecutor(Capacity(4, 2), step_time_s=10.0)
    slow.submit(StepPlan(0, 0))
    with pytest.raises(ExecutorFailed, match="no result within"):
        slow.take_result(0.001)
