"""From a step's result to what each choice gained.

Knows samples, tokens and ends; knows nothing of text or of how deltas travel.
"""

from cluster.engine.executor import ExecutorFailed
from cluster.engine.scheduler import Scheduler
from cluster.engine.sequence import Sequence, SequenceState
from cluster.generation import FinishReason, TokenDelta
from workers.protocol import StepResult


def apply_result(scheduler: Scheduler, result: StepResult) -> list[TokenDelta]:
    """Confirm the samples of the oldest plan in flight, and end the sequences that they end.

    What was sampled for a sequence that has ended since (an abort, or an end-of-sequence token that the previous
    result held) is dropped. Raises `ExecutorFailed`, with nothing confirmed, when the result does not answer
    the plan.
    """
    plan, sampled = scheduler.in_flight.popleft()
    if (result.incarnation, result.step) != (plan.incarnation, plan.step):
        raise ExecutorFailed(
            f"result of step {result.incarnation}/{result.step} where {plan.incarnation}/{plan.step} was due"
        )
    gains = {output.sequence_id: output.token_ids for output in result.outputs}
    missing = [sequence.sequence_id for sequence in sampled if not gains.get(sequence.sequence_id)]
    if missing or len(gains) != len(sampled):
        raise ExecutorFailed(
            f"step {plan.step}: {len(gains)} sequences gained tokens, {len(sampled)} should; none for {missing}"
        )
    deltas = []
    for sequence in sampled:
        if sequence.state is SequenceState.FINISHED:
            continue
        num_cached = 0 if sequence.has_output else sequence.num_cached_tokens
        token_ids, reason = sequence.accept(gains[sequence.sequence_id])
        if reason is not None:
            scheduler.finish(sequence, reason)
        deltas.append(
            TokenDelta(
                sequence.request_id, sequence.sampling.choice, token_ids, reason, num_cached_tokens=num_cached
            )
        )
    return deltas


def final_delta(sequence: Sequence, reason: FinishReason, error: str | None = None) -> TokenDelta:
    """The last delta of a choice that something other than a token ended."""
    return TokenDelta(sequence.request_id, sequence.sampling.choice, (), reason, error)
