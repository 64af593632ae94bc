"""Completions and their pieces in OpenAI's shapes.

Knows OpenAI's response objects; knows nothing of HTTP or of where text comes from. Chunks are put together from
ready-made parts: a GPU replica makes over 10,000 a second, and each is text between the same two frames.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cluster.generation import CompletedChoice, Completion, FinishReason, TextDelta, TokenLogprob
from cluster.ingress.logprobs import Echo, ScoredToken, chat_logprobs, completion_logprobs
from cluster.text.tokenizer import Tokenizer

_to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens billed: prompts count once, whatever `n` is, as do those of them that the prefix cache had."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    def as_object(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerForm:
    """How a request wants its answer written."""

    stream: bool = False
    include_usage: bool = False  # at the end of a stream
    logprobs: bool = False
    echo: bool = False  # the prompt before each choice's text


@dataclass(frozen=True, slots=True)
class Identity:
    """What every object of one answer repeats."""

    answer_id: str
    created: int  # Unix seconds
    model: str
    chat: bool  # /v1/chat/completions rather than /v1/completions

    def frame(self, *, chunk: bool) -> dict[str, Any]:
        kind = f"chat.completion{'.chunk' if chunk else ''}" if self.chat else "text_completion"
        return {"id": self.answer_id, "object": kind, "created": self.created, "model": self.model}


class Contents:
    """The text and `logprobs` of choices and of their pieces: what the two kinds of answer have in common."""

    def __init__(
        self,
        identity: Identity,
        tokenizer: Tokenizer,
        *,
        logprobs: bool = False,
        echoes: Sequence[Echo] = (),  # by choice; none where no prompt is echoed
    ) -> None:
        self.identity = identity
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._echoes = echoes

    @property
    def plain(self) -> bool:
        """Nothing but text is asked for."""
        return not (self._logprobs or self._echoes)

    def opening(
        self,
        index: int,
        piece: TextDelta | CompletedChoice,
        prompt_logprobs: Sequence[TokenLogprob | None] | None,
    ) -> tuple[str, dict[str, Any] | None]:
        """Text and `logprobs` of a choice's first piece, which has the echo before it."""
        text, logprobs = self.following(index, piece)
        if not self._echoes:
            return text, logprobs
        echo = self._echoes[index]
        if self._logprobs:
            assert prompt_logprobs is not None, "an echo with log-probabilities needs those of the prompt"
            logprobs = self._rendered([*echo.scored(prompt_logprobs), *self._tokens(index, piece)])
        return echo.text + text, logprobs

    def following(self, index: int, piece: TextDelta | CompletedChoice) -> tuple[str, dict[str, Any] | None]:
        """Text and `logprobs` of any other piece."""
        return piece.text, self._rendered(self._tokens(index, piece)) if self._logprobs else None

    def _tokens(self, index: int, piece: TextDelta | CompletedChoice) -> list[ScoredToken]:
        before = len(self._echoes[index].text) if self._echoes else 0
        rows = zip(piece.logprobs, piece.text_offsets, strict=True)
        return [ScoredToken(logprob.token_id, before + offset, logprob) for logprob, offset in rows]

    def _rendered(self, tokens: list[ScoredToken]) -> dict[str, Any]:
        return (chat_logprobs if self.identity.chat else completion_logprobs)(tokens, self._tokenizer)


def whole_answer(contents: Contents, completions: Sequence[Completion]) -> dict[str, Any]:
    """The answer that is not streamed. Choices count through the prompts: prompt 0's first, then prompt 1's."""
    owned = [(completion, choice) for completion in completions for choice in completion.choices]
    usage = Usage(
        sum(len(completion.prompt_token_ids) for completion in completions),
        sum(completion.num_completion_tokens for completion in completions),
        sum(completion.num_cached_tokens for completion in completions),
    )
    return contents.identity.frame(chunk=False) | {
        "choices": [_whole_choice(contents, index, *pair) for index, pair in enumerate(owned)],
        "usage": usage.as_object(),
    }


def _whole_choice(
    contents: Contents, index: int, completion: Completion, choice: CompletedChoice
) -> dict[str, Any]:
    text, logprobs = contents.opening(index, choice, completion.prompt_logprobs)
    content = {"message": {"role": "assistant", "content": text}} if contents.identity.chat else {"text": text}
    ending = {"finish_reason": choice.finish_reason.value, "stop_reason": choice.stop_reason}
    return {"index": index, **content, "logprobs": logprobs, **ending}


class ChunkRenderer:
    """The events of one streamed answer, as the bytes of server-sent events."""

    def __init__(self, contents: Contents, *, include_usage: bool) -> None:
        self._contents = contents
        self._chat = contents.identity.chat
        self._opened: set[int] = set()
        frame = _to_json(contents.identity.frame(chunk=True))
        self._before = f'data: {frame[:-1]},"choices":['
        self._after = '],"usage":null}\n\n' if include_usage else "]}\n\n"

    def opening(self, num_choices: int) -> str:
        """Tells the role of each choice, where there are roles."""
        if not self._chat:
            return ""
        return "".join(
            f'{self._before}{{"index":{index},"delta":{{"role":"assistant","content":""}},"logprobs":null,'
            f'"finish_reason":null}}{self._after}'
            for index in range(num_choices)
        )

    def delta(self, index: int, delta: TextDelta) -> str:
        """The text of `delta`, if it has any, and then its end, if it is the last."""
        if self._contents.plain:
            events = self._text(index, delta.text, "null") if delta.text else ""
        else:
            events = self._content(index, delta)
        if delta.finish_reason is None:
            return events
        return events + self._ending(index, delta.finish_reason, delta.stop_reason)

    def usage(self, usage: Usage) -> str:
        return f'{self._before}],"usage":{_to_json(usage.as_object())}}}\n\n'

    def _content(self, index: int, delta: TextDelta) -> str:
        """A token without text has its `logprobs` all the same."""
        if index in self._opened:
            text, logprobs = self._contents.following(index, delta)
        else:
            self._opened.add(index)
            text, logprobs = self._contents.opening(index, delta, delta.prompt_logprobs)
        scored = bool(delta.logprobs) or delta.prompt_logprobs is not None
        return self._text(index, text, _to_json(logprobs if scored else None)) if text or scored else ""

    def _text(self, index: int, text: str, logprobs: str) -> str:
        content = f'"delta":{{"content":{_to_json(text)}}}' if self._chat else f'"text":{_to_json(text)}'
        return (
            f'{self._before}{{"index":{index},{content},"logprobs":{logprobs},"finish_reason":null}}{self._after}'
        )

    def _ending(self, index: int, reason: FinishReason, stop_reason: str | int | None) -> str:
        content = '"delta":{}' if self._chat else '"text":""'
        return (
            f'{self._before}{{"index":{index},{content},"logprobs":null,"finish_reason":"{reason.value}",'
            f'"stop_reason":{_to_json(stop_reason)}}}{self._after}'
        )


DONE = "data: [DONE]\n\n"


def error_event(body: dict[str, Any]) -> str:
    """The last event of a stream that failed: no `[DONE]` comes after it."""
    return f"data: {_to_json(body)}\n\n"
