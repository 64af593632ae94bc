"""What is asked for and what comes back, in tokens and in text: the words shared by every face.

Knows requests, choices, tokens and finish reasons; knows nothing of HTTP, Ray, torch or KV blocks.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from cluster.errors import InvalidRequest

MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_SEED = 2**63 - 1


class FinishReason(StrEnum):
    """Why a choice ended. The first two are OpenAI's."""

    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # max_tokens, or the end of the context
    ABORT = "abort"  # the client left
    ERROR = "error"  # our fault


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop.

    Raises `InvalidRequest`, naming field and value, for anything out of range.
    """

    max_tokens: int | None = None  # None: up to the end of the context
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1

    def __post_init__(self) -> None:
        _check_range("max_tokens", self.max_tokens, 1, None)
        _check_range("temperature", self.temperature, 0, 2)
        if not 0 < self.top_p <= 1:
            raise InvalidRequest(f"top_p must be above 0 and at most 1, not {self.top_p}", "top_p")
        _check_range("top_k", self.top_k, 0, None)
        _check_range("seed", self.seed, 0, MAX_SEED)
        _check_range("n", self.n, 1, MAX_CHOICES)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"stop takes at most {MAX_STOP_STRINGS} strings, not {len(self.stop)}", "stop")
        if any(not text for text in self.stop):
            raise InvalidRequest("stop must not contain an empty string", "stop")


def _check_range(name: str, value: float | None, low: float, high: float | None) -> None:
    if value is None:
        return
    if value != value or value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise InvalidRequest(f"{name} must be {bounds}, not {value}", name)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A checked request in tokens, as the engine takes it. `sampling.max_tokens` is resolved, never None."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """What one choice of a request gained in a step.

    A choice gets any number of deltas; exactly one, its last, has a `finish_reason`. When that is STOP, the last
    token id is the stop token: billed, never shown as text. `error` is set with ERROR and says what happened.
    """

    request_id: str
    choice: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    error: str | None = None


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
    """What one choice gained in text. `token_ids` are those that were billed with this delta."""

    choice: int
    text: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or stop token id that matched; None for EOS


@dataclass(frozen=True, slots=True)
class CompletedChoice:
    """A finished choice: all its text, and the tokens that made it."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    choices: tuple[CompletedChoice, ...] = field(default=())

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text

    @property
    def num_completion_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices)
