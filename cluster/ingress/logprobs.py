"""Log-probabilities in OpenAI's two shapes: a list of objects for chat, parallel lists for completions.

Knows how tokens are spelled in JSON and where they begin in a text, an echoed prompt included; knows nothing of
streams or of where the numbers come from.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.generation import TokenLogprob
from cluster.text.detokenizer import Detokenizer
from cluster.text.tokenizer import Tokenizer

_LOWEST = -9999.0  # what OpenAI has in place of minus infinity, which JSON lacks; of NaN, too


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """One token of an answer. `logprob` is None for the first of a prompt, which nothing comes before."""

    token_id: int
    offset: int  # characters of the text before it
    logprob: TokenLogprob | None


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as the beginning of an answer's text."""

    text: str
    token_ids: tuple[int, ...]
    offsets: tuple[int, ...]  # where each token begins

    def scored(self, prompt_logprobs: Sequence[TokenLogprob | None]) -> list[ScoredToken]:
        rows = zip(self.token_ids, self.offsets, prompt_logprobs, strict=True)
        return [ScoredToken(*row) for row in rows]


def echo_of(prompt: str | Sequence[int], token_ids: tuple[int, ...], tokenizer: Tokenizer) -> Echo:
    """A text is echoed as it was sent; token ids are echoed as the text that they decode to."""
    text = prompt if isinstance(prompt, str) else tokenizer.decode(token_ids)
    at = -1 if Detokenizer(tokenizer).push(token_ids) == f" {text}" else 0  # SentencePiece begins with a space
    detokenizer = Detokenizer(tokenizer)
    offsets = []
    for token_id in token_ids:
        offsets.append(min(max(at, 0), len(text)))
        at += len(detokenizer.push((token_id,)))
        special = tokenizer.special_text(token_id)
        if special and text.startswith(special, at):  # spelled out in the prompt, not added to it
            at += len(special)
    return Echo(text, token_ids, tuple(offsets))


def chat_logprobs(tokens: Iterable[ScoredToken], tokenizer: Tokenizer) -> dict[str, Any]:
    """The `logprobs` of a chat choice."""
    content = []
    for token in tokens:
        assert token.logprob is not None, "chat has no prompt in its answer"
        entry = _chat_token(token.token_id, token.logprob.logprob, tokenizer)
        top = [_chat_token(token_id, logprob, tokenizer) for token_id, logprob in token.logprob.top]
        content.append({**entry, "top_logprobs": top})
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Sequence[ScoredToken], tokenizer: Tokenizer) -> dict[str, Any]:
    """The `logprobs` of a completion choice. The chosen token is always among its `top_logprobs`."""
    return {
        "tokens": [_legacy_name(token.token_id, tokenizer) for token in tokens],
        "token_logprobs": [token.logprob and _number(token.logprob.logprob) for token in tokens],
        "top_logprobs": [token.logprob and _legacy_top(token.logprob, tokenizer) for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def _chat_token(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    data = _spelling(token_id, tokenizer)
    return {"token": _name(data), "logprob": _number(logprob), "bytes": list(data)}


def _legacy_name(token_id: int, tokenizer: Tokenizer) -> str:
    return _name(_spelling(token_id, tokenizer), mark="bytes:")


def _legacy_top(logprob: TokenLogprob, tokenizer: Tokenizer) -> dict[str, float]:
    """By name. Two tokens of one name are one key, which has the likelier one's number."""
    named: dict[str, float] = {}
    for token_id, value in (*logprob.top, (logprob.token_id, logprob.logprob)):
        named.setdefault(_legacy_name(token_id, tokenizer), _number(value))
    return named


def _spelling(token_id: int, tokenizer: Tokenizer) -> bytes:
    """What a token adds to a text; for special tokens, which add nothing, their name."""
    return tokenizer.token_bytes(token_id) or tokenizer.special_text(token_id).encode()


def _name(data: bytes, mark: str = "") -> str:
    """The text of whole characters; bytes as escapes, after `mark`, where one is cut."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return mark + "".join(f"\\x{byte:02x}" for byte in data)


def _number(logprob: float) -> float:
    return logprob if logprob > _LOWEST else _LOWEST  # not `max`, which would keep NaN
