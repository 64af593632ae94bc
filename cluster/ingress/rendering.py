"""Completions and their pieces in OpenAI's shapes.

Knows OpenAI's response objects; knows nothing of HTTP or of where text comes from. Chunks are put together from
ready-made parts: a GPU replica makes over 10,000 a second, and each is text between the same two frames.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cluster.generation import CompletedChoice, Completion, FinishReason, TextDelta

_to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens billed: prompts count once, whatever `n` is."""

    prompt_tokens: int
    completion_tokens: int

    def as_object(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


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


def whole_answer(identity: Identity, completions: Sequence[Completion]) -> dict[str, Any]:
    """The answer that is not streamed. Choices count through the prompts: prompt 0's first, then prompt 1's."""
    choices = [choice for completion in completions for choice in completion.choices]
    usage = Usage(
        sum(len(completion.prompt_token_ids) for completion in completions),
        sum(completion.num_completion_tokens for completion in completions),
    )
    return identity.frame(chunk=False) | {
        "choices": [_whole_choice(identity.chat, index, choice) for index, choice in enumerate(choices)],
        "usage": usage.as_object(),
    }


def _whole_choice(chat: bool, index: int, choice: CompletedChoice) -> dict[str, Any]:
    text = {"message": {"role": "assistant", "content": choice.text}} if chat else {"text": choice.text}
    ending = {"finish_reason": choice.finish_reason.value, "stop_reason": choice.stop_reason}
    return {"index": index, **text, "logprobs": None, **ending}


class ChunkRenderer:
    """The events of one streamed answer, as the bytes of server-sent events."""

    def __init__(self, identity: Identity, *, include_usage: bool) -> None:
        self._chat = identity.chat
        frame = _to_json(identity.frame(chunk=True))
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
        text = self._text(index, delta.text) if delta.text else ""
        if delta.finish_reason is None:
            return text
        return text + self._ending(index, delta.finish_reason, delta.stop_reason)

    def usage(self, usage: Usage) -> str:
        return f'{self._before}],"usage":{_to_json(usage.as_object())}}}\n\n'

    def _text(self, index: int, text: str) -> str:
        content = f'"delta":{{"content":{_to_json(text)}}}' if self._chat else f'"text":{_to_json(text)}'
        return f'{self._before}{{"index":{index},{content},"logprobs":null,"finish_reason":null}}{self._after}'

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
