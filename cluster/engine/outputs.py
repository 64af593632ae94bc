"""From a step's result to what each choice gained.

Knows samples, tokens and ends; knows nothing of text or of how deltas travel.
"""

from cluster.engine.executor import ExecutorFailed
from cluster.engine.logprobs import token_logprobs
from cluster.engine.scheduler import Scheduler
from cluster.engine.sequence import Sequence, SequenceState
from cluster.generation import FinishReason, TokenDelta
from workers.protocol import SequenceId, SequenceOutput, StepPlan, StepResult


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
    outputs = {output.sequence_id: output for output in result.outputs}
    _check_answers(plan, sampled, outputs)
    _note_prompts(scheduler, sampled, outputs)
    deltas = []
    for sequence in sampled:
        if sequence.state is SequenceState.FINISHED:
            continue
        delta = _confirm(sequence, outputs[sequence.sequence_id])
        if delta.finish_reason is not None:
            scheduler.finish(sequence, delta.finish_reason)
        deltas.append(delta)
    return deltas


def final_delta(sequence: Sequence, reason: FinishReason, error: str | None = None) -> TokenDelta:
    """The last delta of a choice that something other than a token ended."""
    return TokenDelta(sequence.request_id, sequence.sampling.choice, (), reason, error)


def _check_answers(plan: StepPlan, sampled: list[Sequence], outputs: dict[SequenceId, SequenceOutput]) -> None:
    """Raises `ExecutorFailed` unless exactly the `sampled` gained tokens, with log-probabilities where asked."""
    gained = {sequence_id for sequence_id, output in outputs.items() if output.token_ids}
    missing = [sequence.sequence_id for sequence in sampled if sequence.sequence_id not in gained]
    if missing or len(gained) != len(sampled):
        raise ExecutorFailed(
            f"step {plan.step}: {len(gained)} sequences gained tokens, {len(sampled)} should; none for {missing}"
        )
    for sequence in sampled:
        output = outputs[sequence.sequence_id]
        scored = 0 if output.logprobs is None else len(output.logprobs.chosen)
        if scored != (0 if sequence.sampling.logprobs is None else len(output.token_ids)):
            raise ExecutorFailed(
                f"step {plan.step}: {scored} log-probabilities for {len(output.token_ids)} tokens of sequence "
                f"{sequence.sequence_id}, which asked for {sequence.sampling.logprobs} alternatives"
            )


def _note_prompts(
    scheduler: Scheduler, sampled: list[Sequence], outputs: dict[SequenceId, SequenceOutput]
) -> None:
    """Keep what the step told of prompts. Raises `ExecutorFailed` where tokens of one are left out."""
    if any(output.prompt_logprobs is not None for output in outputs.values()):
        for sequence in (*scheduler.running, *scheduler.waiting):
            output = outputs.get(sequence.sequence_id)
            if output is None or output.prompt_logprobs is None or sequence.prompt_logprobs is None:
                continue
            try:
                sequence.prompt_logprobs.add(output.prompt_logprobs)
            except ValueError as error:
                raise ExecutorFailed(f"sequence {sequence.sequence_id}: {error}") from error
    for sequence in sampled:
        asked = sequence.prompt_logprobs
        if asked is not None and not asked.complete and sequence.state is not SequenceState.FINISHED:
            raise ExecutorFailed(
                f"sequence {sequence.sequence_id} gained a token before all of its prompt's log-probabilities"
            )


def _confirm(sequence: Sequence, output: SequenceOutput) -> TokenDelta:
    """Accept what a live sequence gained, and say so."""
    num_cached = 0 if sequence.has_output else sequence.num_cached_tokens
    token_ids, reason = sequence.accept(output.token_ids)
    return TokenDelta(
        sequence.request_id,
        sequence.sampling.choice,
        token_ids,
        reason,
        logprobs=() if output.logprobs is None else token_logprobs(token_ids, output.logprobs),
        prompt_logprobs=sequence.take_prompt_logprobs(),
        num_cached_tokens=num_cached,
    )
