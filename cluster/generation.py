"""What is asked for and what comes back, in tokens and in text: the words shared by every face.

Knows requests, choices, tokens and finish reasons; knows nothing of HTTP, Ray, torch or KV blocks.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from cluster.errors import InvalidRequest

MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_SEED = 2**63 - 1
MAX_LOGPROBS = 20
MAX_LOGIT_BIASES = 1024
MAX_BAD_WORDS = 128
MAX_TEXT_CHARACTERS = 4096  # of a stop string or bad word
MAX_PRIORITY = 2**31 - 1
MAX_SALT_CHARACTERS = 256


class FinishReason(StrEnum):
    """Why a choice ended. The first two are OpenAI's."""

    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # max_tokens, or the end of the context
    ABORT = "abort"  # the client left
    ERROR = "error"  # our fault


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop.

    Raises `InvalidRequest`, naming field and value, for anything out of range. Whether a token id is in the
    vocabulary is for those to check who know it.
    """

    max_tokens: int | None = None  # None: up to the end of the context; 0: the prompt alone is computed
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    min_p: float = 0.0  # 0 = off
    repetition_penalty: float = 1.0  # 1 = off; counts prompt and output
    presence_penalty: float = 0.0  # counts the output, as does the next
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit)
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None  # None: all
    seed: int | None = None
    min_tokens: int = 0  # no end-of-sequence or stop token before this many
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; otherwise this many alternatives beside the chosen token
    prompt_logprobs: int | None = None  # the same for the tokens of the prompt
    n: int = 1

    def __post_init__(self) -> None:
        _check_range("max_tokens", self.max_tokens, 0, None)
        _check_range("temperature", self.temperature, 0, 2)
        if not 0 < self.top_p <= 1:
            raise InvalidRequest(f"top_p must be above 0 and at most 1, not {self.top_p}", "top_p")
        _check_range("top_k", self.top_k, 0, None)
        _check_range("min_p", self.min_p, 0, 1)
        if not 0 < self.repetition_penalty <= 10:
            raise InvalidRequest(
                f"repetition_penalty must be above 0 and at most 10, not {self.repetition_penalty}",
                "repetition_penalty",
            )
        _check_range("presence_penalty", self.presence_penalty, -2, 2)
        _check_range("frequency_penalty", self.frequency_penalty, -2, 2)
        _check_range("seed", self.seed, 0, MAX_SEED)
        _check_range("min_tokens", self.min_tokens, 0, None)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens must be at most max_tokens ({self.max_tokens}), not {self.min_tokens}", "min_tokens"
            )
        _check_range("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _check_range("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        _check_range("n", self.n, 1, MAX_CHOICES)
        _check_texts("stop", self.stop, MAX_STOP_STRINGS)
        _check_texts("bad_words", self.bad_words, MAX_BAD_WORDS)
        _check_token_ids("stop_token_ids", self.stop_token_ids)
        self._check_logit_bias()
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise InvalidRequest("allowed_token_ids must not be empty", "allowed_token_ids")
            _check_token_ids("allowed_token_ids", self.allowed_token_ids)

    def _check_logit_bias(self) -> None:
        if len(self.logit_bias) > MAX_LOGIT_BIASES:
            raise InvalidRequest(
                f"logit_bias takes at most {MAX_LOGIT_BIASES} tokens, not {len(self.logit_bias)}", "logit_bias"
            )
        _check_token_ids("logit_bias", [token_id for token_id, _ in self.logit_bias])
        for _, bias in self.logit_bias:
            _check_range("logit_bias", bias, -100, 100)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """How a request is treated among others. None of it changes a token of its output.

    Raises `InvalidRequest`, naming field and value, for anything out of range.
    """

    priority: int = 0  # lower comes first
    cache_salt: str | None = None  # cached prompts are shared among requests of an equal salt only

    def __post_init__(self) -> None:
        _check_range("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY)
        salt = self.cache_salt
        if salt is not None and not 0 < len(salt) <= MAX_SALT_CHARACTERS:
            bounds = f"between 1 and {MAX_SALT_CHARACTERS} characters"
            raise InvalidRequest(f"cache_salt must have {bounds}, not {len(salt)}", "cache_salt")
        if salt is not None and any("\ud800" <= character <= "\udfff" for character in salt):
            raise InvalidRequest("cache_salt is not valid Unicode: it has a lone surrogate", "cache_salt")


def _check_range(name: str, value: float | None, low: float, high: float | None) -> None:
    if value is None:
        return
    if value != value or value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise InvalidRequest(f"{name} must be {bounds}, not {value}", name)


def _check_texts(name: str, texts: Sequence[str], most: int) -> None:
    if len(texts) > most:
        raise InvalidRequest(f"{name} takes at most {most} strings, not {len(texts)}", name)
    if any(not text for text in texts):
        raise InvalidRequest(f"{name} must not contain an empty string", name)
    longest = max(map(len, texts), default=0)
    if longest > MAX_TEXT_CHARACTERS:
        raise InvalidRequest(
            f"{name} takes strings of at most {MAX_TEXT_CHARACTERS} characters, not {longest}", name
        )


def _check_token_ids(name: str, token_ids: Sequence[int]) -> None:
    if token_ids and min(token_ids) < 0:
        raise InvalidRequest(f"{name} must have token ids of at least 0, not {min(token_ids)}", name)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A checked request in tokens, as the engine takes it. `sampling.max_tokens` is resolved, never None."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    bad_words_ids: tuple[tuple[int, ...], ...] = ()  # `sampling.bad_words`, encoded in every way they may appear
    priority: int = 0  # lower comes first
    cache_salt: str | None = None  # cached prompts are shared among requests of an equal salt only


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely a token was, in the model's own distribution: before temperature, penalties and filters."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # the likeliest (token id, logprob), likeliest first, equal ones by id


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """What one choice of a request gained in a step.

    A choice gets any number of deltas; exactly one, its last, has a `finish_reason`. When that is STOP, the last
    token id is the stop token: billed, never shown as text. (That of a choice which its reader has finished, for a
    stop string, has no token, and no reader.) `error` is set with ERROR and says what happened.
    Where asked, `logprobs` has one entry a token id, and one delta of each choice, not later than its first token,
    has `prompt_logprobs`: one entry a prompt token, the first of them None.
    """

    request_id: str
    choice: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    error: str | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache; in a choice's first delta


class TokenSource(Protocol):
    """Where tokens come from: a driver across the cluster, or an engine in this process."""

    def stream(self, request: GenerationRequest) -> AsyncIterator[TokenDelta]:
        """Submit `request` and yield its deltas until every choice has finished.

        Leaving the iteration early (aclose, cancellation) aborts what still runs. Raises `Overloaded` or
        `Unavailable` before the first delta, `GenerationFailed` or `Unavailable` later.
        """
        ...

    async def finish_choice(self, request_id: str, choice: int) -> None:
        """End one choice early, because its text met a stop string. Its remaining deltas are not sent."""
        ...


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What one choice gained in text. `token_ids` are those that were billed with this delta.

    `logprobs` come with the text: a token has its entry once a character from its place on is shown, and never
    when a stop string or a stop token kept its text back.
    """

    choice: int
    text: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or stop token id that matched; None for EOS
    logprobs: tuple[TokenLogprob, ...] = ()
    text_offsets: tuple[int, ...] = ()  # where each token of `logprobs` begins in the choice's text, in characters
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None  # as in `TokenDelta`, as is the next
    num_cached_tokens: int = 0

    def followed_by(self, later: "TextDelta") -> "TextDelta":
        """One delta that says what this one and the next of its choice say."""
        return TextDelta(
            self.choice,
            self.text + later.text,
            self.token_ids + later.token_ids,
            later.finish_reason,
            later.stop_reason,
            self.logprobs + later.logprobs,
            self.text_offsets + later.text_offsets,
            later.prompt_logprobs if self.prompt_logprobs is None else self.prompt_logprobs,
            self.num_cached_tokens + later.num_cached_tokens,
        )


@dataclass(frozen=True, slots=True)
class CompletedChoice:
    """A finished choice: all its text, and the tokens that made it."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] = ()  # of the tokens that the text shows
    text_offsets: tuple[int, ...] = ()  # where each of them begins in `text`, in characters


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    choices: tuple[CompletedChoice, ...] = field(default=())
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    num_cached_tokens: int = 0

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text

    @property
    def num_completion_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices)
