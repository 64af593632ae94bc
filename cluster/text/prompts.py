"""From a prompt or a conversation to a checked request in tokens.

Finds everything that can be wrong with a request, so that the engine is never asked for what cannot be served.
Knows the tokenizer, the chat template and the length of the context; knows nothing of HTTP or of the engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cluster.errors import ContextOverflow, InvalidRequest
from cluster.generation import GenerationRequest, RequestOptions, SamplingParams
from cluster.text.chat_template import ChatMessage, ChatTemplate
from cluster.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]  # text, or token ids


@dataclass(frozen=True, slots=True)
class PromptEncoder:
    """All methods raise `InvalidRequest`, naming the field and the numbers."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    max_model_len: int  # tokens a sequence may have, prompt and output together
    vocab_size: int  # ids that the model has embeddings for

    def encode(self, prompt: Prompt, field: str = "prompt", *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """The ids of a raw prompt: text gets what the tokenizer puts around it, ids are taken as they are."""
        if not isinstance(prompt, str):
            token_ids = tuple(prompt)
        else:
            token_ids = self._encode_text(prompt, field, add_special_tokens)
        self._check_vocabulary(token_ids, field)
        if not token_ids:
            raise InvalidRequest(f"{field} must have at least one token, but it is empty", field)
        return token_ids

    def encode_chat(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        """The ids of a conversation. The chat template brings the special tokens, so none are added."""
        if self.chat_template is None:
            raise InvalidRequest(
                "this model has no chat template, so it takes no messages; use /v1/completions with a prompt",
                "messages",
            )
        if not messages:
            raise InvalidRequest("messages must have at least one message, but it is empty", "messages")
        return self.encode(self.chat_template.render(messages), "messages", add_special_tokens=False)

    def check(
        self,
        request_id: str,
        token_ids: tuple[int, ...],
        sampling: SamplingParams,
        field: str = "prompt",
        *,
        default_max_tokens: int | None = None,  # of what is left of the context; None: all of it
        options: RequestOptions | None = None,
    ) -> GenerationRequest:
        """The request for the engine, with `max_tokens` resolved and `bad_words` encoded."""
        self._check_vocabulary(sampling.stop_token_ids, "stop_token_ids")
        self._check_vocabulary(tuple(token_id for token_id, _ in sampling.logit_bias), "logit_bias")
        self._check_vocabulary(sampling.allowed_token_ids or (), "allowed_token_ids")
        left = self.max_model_len - len(token_ids)
        if left < 1:
            raise ContextOverflow(
                f"{field} has {len(token_ids)} tokens, but the maximum context length of this model is "
                f"{self.max_model_len} tokens, of which at least one must be left for the output",
                field,
            )
        if sampling.max_tokens is None:
            max_tokens = left if default_max_tokens is None else min(left, default_max_tokens)
            sampling = replace(sampling, max_tokens=max_tokens)
        elif sampling.max_tokens > left:
            raise ContextOverflow(
                f"{field} has {len(token_ids)} tokens and max_tokens is {sampling.max_tokens}, together "
                f"{len(token_ids) + sampling.max_tokens}, but the maximum context length of this model is "
                f"{self.max_model_len} tokens",
                "max_tokens",
            )
        return GenerationRequest(
            request_id,
            token_ids,
            sampling,
            self._encode_bad_words(sampling.bad_words),
            options.priority if options else 0,
            options.cache_salt if options else None,
        )

    def _encode_bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word as it is, and as it stands after a space, where that gives other tokens."""
        encoded: dict[tuple[int, ...], None] = {}
        for position, word in enumerate(words):
            field = f"bad_words[{position}]"
            token_ids = self.encode(word, field, add_special_tokens=False)
            spaced = self.encode(f" {word}", field, add_special_tokens=False)
            encoded[token_ids] = None
            if spaced[-len(token_ids) :] != token_ids:
                encoded[spaced] = None
        return tuple(encoded)

    def _encode_text(self, text: str, field: str, add_special_tokens: bool) -> tuple[int, ...]:
        try:
            encoded = text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"{field} is not valid Unicode: a lone surrogate at position {error.start}", field
            ) from None
        self._check_size(encoded, field)
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _check_size(self, text: bytes, field: str) -> None:
        """Encoding takes about a second a megabyte, so what cannot fit however it is encoded is refused before."""
        fewest = self.tokenizer.fewest_tokens(text)
        if fewest > self.max_model_len:
            raise ContextOverflow(
                f"{field} has {len(text)} bytes of text, which are at least {fewest} tokens, but the maximum "
                f"context length of this model is {self.max_model_len} tokens",
                field,
            )

    def _check_vocabulary(self, token_ids: tuple[int, ...], field: str) -> None:
        if not token_ids or (min(token_ids) >= 0 and max(token_ids) < self.vocab_size):
            return
        strangers = (
            (at, token_id) for at, token_id in enumerate(token_ids) if not 0 <= token_id < self.vocab_size
        )
        position, token_id = next(strangers)
        raise InvalidRequest(
            f"{field} has token id {token_id} at position {position}, but token ids are between 0 and "
            f"{self.vocab_size - 1}",
            field,
        )
