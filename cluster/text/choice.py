"""From the tokens of a request to its text, one delta at a time.

Knows tokens, text and stop strings; synchronous, so that an offline engine uses it as well as an event loop. What
is streamed and what is returned whole come from here alike, so they cannot differ.
"""

from cluster.errors import GenerationFailed, Unavailable
from cluster.generation import (
    CompletedChoice,
    Completion,
    FinishReason,
    GenerationRequest,
    SamplingParams,
    TextDelta,
    TokenDelta,
    TokenLogprob,
)
from cluster.text.detokenizer import Detokenizer
from cluster.text.shown_tokens import ShownTokens
from cluster.text.stopping import StopMatcher
from cluster.text.tokenizer import Tokenizer


class ChoiceText:
    """One choice. Invariant: once it has finished, whatever else comes is neither shown nor billed."""

    def __init__(self, index: int, tokenizer: Tokenizer, sampling: SamplingParams) -> None:
        self._index = index
        self._stop_token_ids = frozenset(sampling.stop_token_ids)
        self._shows_stop = sampling.include_stop_str_in_output
        self._has_logprobs = sampling.logprobs is not None
        self._token_by_token = bool(sampling.stop) or self._has_logprobs
        self._num_unstoppable = (
            sampling.min_tokens if sampling.stop else 0
        )  # tokens in which no stop string counts
        self._detokenizer = Detokenizer(tokenizer)
        self._matcher = StopMatcher(sampling.stop, include_match=self._shows_stop)
        self._tokens = ShownTokens()
        self._num_characters = 0  # detokenized so far
        self.finished = False

    def push(self, delta: TokenDelta) -> TextDelta | None:
        """What `delta` adds; None once the choice has finished.

        Raises `GenerationFailed` or `Unavailable` for a choice that the engine gave up.
        """
        if self.finished:
            return None
        if delta.finish_reason is None and not self._token_by_token:
            return self._gain(delta, self._detokenizer.push(delta.token_ids), delta.token_ids)
        _raise_if_given_up(delta)
        text, num_pushed = self._push_tokens(delta, self._num_shown(delta))
        if self._has_matched():
            return self._matched(delta, text, delta.token_ids[:num_pushed])
        if delta.finish_reason is None:
            return self._gain(delta, text, delta.token_ids)
        text += self._matcher.push(self._detokenizer.finish())
        if self._has_matched():
            return self._matched(delta, text, delta.token_ids)
        text += self._matcher.finish()
        return self._gain(delta, text, delta.token_ids, delta.finish_reason, self._stop_token(delta))

    def _num_shown(self, delta: TokenDelta) -> int:
        """All but the token that stops; where stops are shown, all but the model's own end of sequence."""
        stops = delta.finish_reason is FinishReason.STOP
        hidden = stops and not (self._shows_stop and self._stop_token(delta) is not None)
        return len(delta.token_ids) - hidden

    def _push_tokens(self, delta: TokenDelta, num_shown: int) -> tuple[str, int]:
        """The text that the first `num_shown` tokens release, and how many were pushed until a stop string."""
        if not self._token_by_token:
            return self._detokenizer.push(delta.token_ids[:num_shown]), num_shown
        pieces = []
        for position in range(num_shown):
            if self._has_logprobs:
                self._tokens.add(self._num_characters, delta.logprobs[position])
            piece = self._detokenizer.push(delta.token_ids[position : position + 1])
            self._num_characters += len(piece)
            if self._num_unstoppable > 0:
                self._num_unstoppable -= 1
                pieces.append(piece)
                continue
            pieces.append(self._matcher.push(piece))
            if self._has_matched():
                return "".join(pieces), position + 1
        return "".join(pieces), num_shown

    def _has_matched(self) -> bool:
        return self._matcher.matched is not None

    def _stop_token(self, delta: TokenDelta) -> int | None:
        """The stop token that the user asked for; None for the model's own end of sequence."""
        if delta.finish_reason is not FinishReason.STOP or delta.token_ids[-1] not in self._stop_token_ids:
            return None
        return delta.token_ids[-1]

    def _matched(self, delta: TokenDelta, text: str, billed: tuple[int, ...]) -> TextDelta:
        return self._gain(delta, text, billed, FinishReason.STOP, self._matcher.matched)

    def _gain(
        self,
        delta: TokenDelta,
        text: str,
        billed: tuple[int, ...],
        reason: FinishReason | None = None,
        stop_reason: str | int | None = None,
    ) -> TextDelta:
        self.finished = reason is not None
        logprobs: tuple[TokenLogprob, ...] = ()
        offsets: tuple[int, ...] = ()
        if self._has_logprobs:
            to_the_end = self.finished and not self._has_matched()
            shown = self._tokens.release(len(text), all_text=to_the_end)
            offsets = tuple(offset for offset, _ in shown)
            logprobs = tuple(logprob for _, logprob in shown)
        return TextDelta(
            self._index,
            text,
            billed,
            reason,
            stop_reason,
            logprobs,
            offsets,
            delta.prompt_logprobs,
            delta.num_cached_tokens,
        )


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
        self._choices = [_ChoiceBuilder(index) for index in range(request.sampling.n)]
        self._prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
        self._num_cached_tokens = 0

    def add(self, delta: TextDelta) -> None:
        self._choices[delta.choice].add(delta)
        if delta.choice == 0:  # every choice says it; the first one counts
            self._prompt_logprobs = self._prompt_logprobs or delta.prompt_logprobs
            self._num_cached_tokens += delta.num_cached_tokens

    def completion(self) -> Completion:
        return Completion(
            self._request.request_id,
            self._request.prompt_token_ids,
            tuple(choice.completed() for choice in self._choices),
            self._prompt_logprobs,
            self._num_cached_tokens,
        )


class _ChoiceBuilder:
    """Keeps what deltas hold rather than the deltas: there is one for every token of a batch."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._text_offsets: list[int] = []
        self._last: TextDelta | None = None

    def add(self, delta: TextDelta) -> None:
        self._texts.append(delta.text)
        self._token_ids.extend(delta.token_ids)
        self._logprobs.extend(delta.logprobs)
        self._text_offsets.extend(delta.text_offsets)
        if delta.finish_reason is not None:
            self._last = delta

    def completed(self) -> CompletedChoice:
        last = self._last
        assert last is not None
        assert last.finish_reason is not None
        return CompletedChoice(
            self._index,
            "".join(self._texts),
            tuple(self._token_ids),
            last.finish_reason,
            last.stop_reason,
            tuple(self._logprobs),
            tuple(self._text_offsets),
        )


def _raise_if_given_up(delta: TokenDelta) -> None:
    if delta.finish_reason is FinishReason.ERROR:
        raise GenerationFailed(delta.error or "the engine could not finish the request")
    if delta.finish_reason is FinishReason.ABORT:  # not by this client: it is still here
        raise Unavailable(delta.error or "the request was ended by the cluster before it was finished")
