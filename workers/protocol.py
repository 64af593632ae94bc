"""The messages between a driver and its ranks: plans go down, results come up.

A plan names, for every sequence it touches, how many tokens to compute now. Ranks keep a mirror of the live
sequences, so a known sequence costs a few integers, and a plan never depends on the ids of a step in flight: a
rank takes the last sampled id from its own mirror. Prefill, a chunk of it, a decode and a recovery replay differ
only in numbers. A row samples when its step reaches the end of the tokens known to the mirror.

Knows tokens and blocks; knows nothing of text, HTTP, Ray or torch.
"""

from dataclasses import dataclass, field
from typing import NewType

PROTOCOL_VERSION = 2

SequenceId = NewType("SequenceId", int)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adjustments:
    """What changes a row's logits before its token is chosen. All token ids are in the vocabulary.

    A rank applies a mask (the last four) only as far as it leaves a token to choose.
    """

    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added)
    repetition_penalty: float = 1.0  # 1 = off; counts prompt and output
    presence_penalty: float = 0.0  # counts the output, as does the next
    frequency_penalty: float = 0.0
    allowed_token_ids: tuple[int, ...] | None = None  # None = all
    min_tokens: int = 0  # as long as the output is shorter, none of the next is chosen
    stop_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()  # runs of tokens that are never completed


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """What a rank needs to draw a token. Stops and lengths are the driver's business."""

    temperature: float  # 0 = greedy
    top_k: int  # 0 = off
    top_p: float  # 1 = off
    seed: int  # 0 <= seed < 2**64; drawn at submission when the user gave none
    choice: int  # index of the choice within its request: part of the random stream's key
    min_p: float = 0.0  # 0 = off
    adjustments: Adjustments | None = None  # None: none of them, which is faster than defaults
    logprobs: int | None = None  # None: none; otherwise this many alternatives beside each new token
    prompt_logprobs: int | None = None  # the same for the tokens of the prompt


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence the ranks do not hold: just admitted, or back after a preemption or a recovery."""

    sequence_id: SequenceId
    token_ids: tuple[int, ...]  # all known tokens: the prompt, and what was generated before
    num_prompt_tokens: int
    sampling: SamplingSettings
    blocks: tuple[int, ...]
    num_computed_tokens: int  # already in the KV cache (a prefix hit), 0 otherwise
    num_new_tokens: int  # to compute in this step


@dataclass(frozen=True, slots=True)
class KnownSequence:
    """What changes in this step for a sequence that the ranks hold."""

    sequence_id: SequenceId
    num_new_tokens: int
    new_blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass. Ranks first drop `ended`, then add `new`, then run everything named.

    A plan without sequences is a heartbeat: it runs one collective over all ranks and nothing else.
    """

    incarnation: int
    step: int  # counts up by one within an incarnation, from 0
    new: tuple[NewSequence, ...] = ()
    known: tuple[KnownSequence, ...] = ()
    ended: tuple[SequenceId, ...] = ()


@dataclass(frozen=True, slots=True)
class StopWorkers:
    """Ends a rank's loop. Sent down in place of a plan."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class Logprobs:
    """How likely consecutive tokens of a sequence were in the model's own distribution.

    Natural logarithms after a softmax of the logits as the model gives them: before temperature, penalties, biases
    and filters. The likeliest stand row by row, likeliest first, equal ones by id.
    """

    start: int  # position of the first of the tokens in its sequence
    chosen: tuple[float, ...]  # one a token
    num_top: int = 0
    top_ids: tuple[int, ...] = ()  # num_top a token
    top: tuple[float, ...] = ()  # theirs


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """What one sequence gained in a step: tokens (one, until speculation gives several), and log-probabilities.

    These are of `token_ids`, and of the prompt tokens that follow the ones computed in the step, where asked.
    """

    sequence_id: SequenceId
    token_ids: tuple[int, ...]
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class StepTimings:
    """Where rank 0's wall time of a step went, in seconds. The parts do not overlap.

    With a GPU they are the host's: `forward` and `collectives` queue work, `sample` has the wait for the device.
    """

    wait: float = 0.0  # for the plan to arrive
    prepare: float = 0.0  # decode, apply to the mirror, build the batch
    forward: float = 0.0  # without the collectives inside it
    collectives: float = 0.0
    sample: float = 0.0


@dataclass(frozen=True, slots=True)
class StepResult:
    """What rank 0 reports of a finished step. Sequences that gained nothing are absent."""

    incarnation: int
    step: int
    outputs: tuple[SequenceOutput, ...] = ()
    timings: StepTimings = field(default_factory=StepTimings)


@dataclass(frozen=True, slots=True)
class StepFailure:
    """Any rank's report that it cannot go on. The whole incarnation ends with it."""

    incarnation: int
    step: int
    rank: int
    message: str
    traceback: str


Message = StepPlan | StopWorkers | StepResult | StepFailure
