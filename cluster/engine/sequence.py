"""One choice of a request on its way: its tokens, how far they are computed, and when it ends.

Knows tokens, counts and finish rules; knows nothing of other sequences, plans, text, HTTP, Ray or torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from cluster.engine.block_hashing import BlockText
from cluster.engine.logprobs import PromptLogprobs
from cluster.generation import FinishReason, GenerationRequest, TokenLogprob
from workers.protocol import Adjustments, KnownSequence, SamplingSettings, SequenceId


class SequenceState(Enum):
    WAITING = auto()  # the ranks do not hold it: not yet admitted, or preempted
    RUNNING = auto()  # the ranks hold it, with its blocks
    FINISHED = auto()


TRANSITIONS: Mapping[SequenceState, frozenset[SequenceState]] = {
    SequenceState.WAITING: frozenset({SequenceState.RUNNING, SequenceState.FINISHED}),
    SequenceState.RUNNING: frozenset({SequenceState.WAITING, SequenceState.FINISHED}),
    SequenceState.FINISHED: frozenset(),
}


@dataclass(slots=True, eq=False)
class Sequence:
    """One accounting rule: `num_computed_tokens` chases `len(token_ids) + num_pending_tokens`.

    A token is pending from the moment a plan samples it until that step's result names it. All counts are those
    after every plan handed out so far, so the next plan can be made while earlier ones still run. Ids count up in
    order of arrival; `order` puts lower priorities first and, among equal ones, earlier arrivals.
    """

    sequence_id: SequenceId
    request_id: str
    sampling: SamplingSettings
    token_ids: list[int]  # the prompt, then what was generated and confirmed
    num_prompt_tokens: int
    max_total_tokens: int  # it ends by length when it has this many
    stop_token_ids: frozenset[int]
    min_tokens: int = 0  # a stop token ends it only after this many
    prompt_only: bool = False  # the ranks sample a token all the same; it is dropped
    prompt_logprobs: PromptLogprobs | None = None  # where asked, until they have gone out
    priority: int = 0
    cache_fields: Mapping[str, str] = field(default_factory=dict)  # cached blocks are shared where these are equal
    state: SequenceState = SequenceState.WAITING
    num_computed_tokens: int = 0
    num_pending_tokens: int = 0
    blocks: list[int] = field(default_factory=list)
    has_started: bool = False  # at least once
    num_cached_tokens: int = 0  # found in the prefix cache when it first started
    texts: list[BlockText] = field(default_factory=list, repr=False)  # `PrefixCache`'s: a root, then one a block
    num_kept_blocks: int = 0  # `PrefixCache`'s: so many of `blocks` were found in it or offered to it
    num_tokens_at_start: int = 0  # when it came into its present state
    num_strikes: int = 0  # `Suspects`': failures of the ranks since its last token that may be its fault
    suspected: range = range(0)  # likewise: positions that were on their way in all of them
    finish_reason: FinishReason | None = None
    decode_row: KnownSequence = field(init=False)  # what most plans say of it, made once
    order: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.decode_row = KnownSequence(self.sequence_id, 1)
        self.order = (self.priority, self.sequence_id)

    @property
    def num_tokens_left_to_compute(self) -> int:
        return len(self.token_ids) + self.num_pending_tokens - self.num_computed_tokens

    @property
    def last_token_is_pending(self) -> bool:
        """All tokens it may have are made or on their way: there is nothing more to plan."""
        return len(self.token_ids) + self.num_pending_tokens >= self.max_total_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def has_output(self) -> bool:
        return self.num_output_tokens > 0

    @property
    def has_gained(self) -> bool:
        """Whether a token has been confirmed since it came into its present state."""
        return len(self.token_ids) > self.num_tokens_at_start

    @property
    def reads_cache(self) -> bool:
        """Not while log-probabilities of its prompt are wanted: what is not computed has no logits."""
        return self.prompt_logprobs is None

    def become(self, state: SequenceState) -> None:
        assert state in TRANSITIONS[self.state], f"sequence {self.sequence_id}: {self.state} -> {state}"
        self.state = state
        self.num_tokens_at_start = len(self.token_ids)

    def advance(self, num_tokens: int) -> bool:
        """Count `num_tokens` as computed by a plan. Whether that plan's step samples a token for it."""
        self.num_computed_tokens += num_tokens
        samples = self.num_tokens_left_to_compute == 0
        if samples:
            self.num_pending_tokens += 1
        return samples

    def accept(self, token_ids: tuple[int, ...]) -> tuple[tuple[int, ...], FinishReason | None]:
        """Confirm a pending sample. Returns the tokens that count and, if they end the sequence, why.

        Tokens after the one that ends it are dropped. A stop token at the very limit is a stop.
        """
        self.num_pending_tokens -= 1
        self.num_strikes = 0
        if self.prompt_only:
            return (), FinishReason.LENGTH
        for position, token in enumerate(token_ids):
            self.token_ids.append(token)
            if token in self.stop_token_ids and self.num_output_tokens > self.min_tokens:
                return token_ids[: position + 1], FinishReason.STOP
            if len(self.token_ids) >= self.max_total_tokens:
                return token_ids[: position + 1], FinishReason.LENGTH
        return token_ids, None

    def take_prompt_logprobs(self) -> tuple[TokenLogprob | None, ...] | None:
        """Those of the prompt, once; after a preemption the ranks need not find them again."""
        if self.prompt_logprobs is None:
            return None
        found = self.prompt_logprobs.take()
        self.prompt_logprobs = None
        self.sampling = replace(self.sampling, prompt_logprobs=None)
        return found


def make_sequence(
    request: GenerationRequest,
    choice: int,
    *,
    sequence_id: SequenceId,
    seed: int,
    max_total_tokens: int,
    eos_token_ids: tuple[int, ...],
) -> Sequence:
    """The sequence of one choice. `seed` is the request's own, or the one drawn for it at submission."""
    asked = request.sampling
    prompt_only = asked.max_tokens == 0
    stops = asked.stop_token_ids if asked.ignore_eos else asked.stop_token_ids + eos_token_ids
    return Sequence(
        sequence_id=sequence_id,
        request_id=request.request_id,
        sampling=SamplingSettings(
            temperature=asked.temperature,
            top_k=asked.top_k,
            top_p=asked.top_p,
            seed=seed,
            choice=choice,
            min_p=asked.min_p,
            adjustments=_adjustments(request, stops),
            logprobs=asked.logprobs,
            prompt_logprobs=asked.prompt_logprobs,
        ),
        token_ids=list(request.prompt_token_ids),
        num_prompt_tokens=len(request.prompt_token_ids),
        max_total_tokens=max_total_tokens + prompt_only,
        stop_token_ids=frozenset(stops),
        min_tokens=asked.min_tokens,
        prompt_only=prompt_only,
        prompt_logprobs=None if asked.prompt_logprobs is None else PromptLogprobs(request.prompt_token_ids),
        priority=request.priority,
        cache_fields={} if request.cache_salt is None else {"cache_salt": request.cache_salt},
    )


def _adjustments(request: GenerationRequest, stops: tuple[int, ...]) -> Adjustments | None:
    """What the ranks do to the logits; None when nothing is asked for, which is faster there."""
    asked = request.sampling
    adjustments = Adjustments(
        logit_bias=asked.logit_bias,
        repetition_penalty=asked.repetition_penalty,
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        allowed_token_ids=asked.allowed_token_ids,
        min_tokens=asked.min_tokens if stops else 0,
        stop_token_ids=stops if asked.min_tokens else (),
        bad_words=request.bad_words_ids,
    )
    return None if adjustments == Adjustments() else adjustments
