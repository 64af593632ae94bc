"""From the tokens of a request to its text, one delta at a time.

Knows tokens, text and stop strings; synchronous, so that an offline engine uses it as well as an event loop. What
is streamed and what is returned whole come from here alike, so they cannot differ.
"""

from collections.abc import Iterable

from cluster.errors import GenerationFailed, Unavailable
from cluster.generation import (
    CompletedChoice,
    Completion,
    FinishReason,
    GenerationRequest,
    SamplingParams,
    TextDelta,
    TokenDelta,
)
from cluster.text.detokenizer import Detokenizer
from cluster.text.stopping import StopMatcher
from cluster.text.tokenizer import Tokenizer


class ChoiceText:
    """One choice. Invariant: once it has finished, whatever else comes is neither shown nor billed."""

    def __init__(self, index: int, tokenizer: Tokenizer, sampling: SamplingParams) -> None:
        self._index = index
        self._stop_token_ids = frozenset(sampling.stop_token_ids)
        self._has_stop_strings = bool(sampling.stop)
        self._detokenizer = Detokenizer(tokenizer)
        self._matcher = StopMatcher(sampling.stop)
        self.finished = False

    def push(self, delta: TokenDelta) -> TextDelta | None:
        """What `delta` adds; None once the choice has finished.

        Raises `GenerationFailed` or `Unavailable` for a choice that the engine gave up.
        """
        if self.finished:
            return None
        if delta.finish_reason is None and not self._has_stop_strings:
            return TextDelta(self._index, self._detokenizer.push(delta.token_ids), delta.token_ids)
        _raise_if_given_up(delta)
        shown = delta.token_ids[:-1] if delta.finish_reason is FinishReason.STOP else delta.token_ids
        pieces = []
        for position, run in enumerate(self._runs(shown), start=1):
            pieces.append(self._matcher.push(self._detokenizer.push(run)))
            if self._matcher.matched is not None:
                return self._finish(pieces, shown[:position], FinishReason.STOP, self._matcher.matched)
        if delta.finish_reason is None:
            return TextDelta(self._index, "".join(pieces), delta.token_ids)
        pieces.append(self._matcher.push(self._detokenizer.finish()))
        if self._matcher.matched is not None:
            return self._finish(pieces, delta.token_ids, FinishReason.STOP, self._matcher.matched)
        pieces.append(self._matcher.finish())
        return self._finish(pieces, delta.token_ids, delta.finish_reason, self._stop_token(delta))

    def _runs(self, token_ids: tuple[int, ...]) -> Iterable[tuple[int, ...]]:
        """Token by token where a stop string may end the text between two, all at once otherwise."""
        return ((token_id,) for token_id in token_ids) if self._has_stop_strings else (token_ids,)

    def _stop_token(self, delta: TokenDelta) -> int | None:
        """The stop token that the user asked for; None for the model's own end of sequence."""
        if delta.finish_reason is not FinishReason.STOP or delta.token_ids[-1] not in self._stop_token_ids:
            return None
        return delta.token_ids[-1]

    def _finish(
        self, pieces: list[str], billed: tuple[int, ...], reason: FinishReason, stop_reason: str | int | None
    ) -> TextDelta:
        self.finished = True
        return TextDelta(self._index, "".join(pieces), billed, reason, stop_reason)


class RequestText:
    """All choices of one request, by their index."""

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer) -> None:
        sampling = request.sampling
        self._choices = [ChoiceText(index, tokenizer, sampling) for index in range(sampling.n)]
        self._open = sampling.n

    @property
    def finished(self) -> bool:
        """Nothing is left to come."""
        return self._open == 0

    def push(self, delta: TokenDelta) -> TextDelta | None:
        """What `delta` adds to its choice; None when that has finished already."""
        text = self._choices[delta.choice].push(delta)
        if text is not None and text.finish_reason is not None:
            self._open -= 1
        return text


class CompletionBuilder:
    """Adds up the deltas of one request. `completion` needs every choice to have finished."""

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        self._texts: list[list[str]] = [[] for _ in range(request.sampling.n)]
        self._token_ids: list[list[int]] = [[] for _ in range(request.sampling.n)]
        self._last: dict[int, TextDelta] = {}

    def add(self, delta: TextDelta) -> None:
        self._texts[delta.choice].append(delta.text)
        self._token_ids[delta.choice].extend(delta.token_ids)
        if delta.finish_reason is not None:
            self._last[delta.choice] = delta

    def completion(self) -> Completion:
        return Completion(
            self._request.request_id,
            self._request.prompt_token_ids,
            tuple(self._choice(index) for index in range(self._request.sampling.n)),
        )

    def _choice(self, index: int) -> CompletedChoice:
        last = self._last[index]
        assert last.finish_reason is not None
        return CompletedChoice(
            index,
            "".join(self._texts[index]),
            tuple(self._token_ids[index]),
            last.finish_reason,
            last.stop_reason,
        )


def _raise_if_given_up(delta: TokenDelta) -> None:
    if delta.finish_reason is FinishReason.ERROR:
        raise GenerationFailed(delta.error or "the engine could not finish the request")
    if delta.finish_reason is FinishReason.ABORT:  # not by this client: it is still here
        raise Unavailable(delta.error or "the request was ended by the cluster before it was finished")
