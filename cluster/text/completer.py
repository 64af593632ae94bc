"""A prompt and sampling parameters in, text out: the one way from text to tokens and back, whatever the face.

HTTP, `Client` and `LLM` all go through here. Knows text and a `TokenSource`; knows nothing of HTTP or Ray.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import cast

from cluster.errors import GenerationFailed, ShardserveError
from cluster.generation import (
    Completion,
    GenerationRequest,
    RequestOptions,
    SamplingParams,
    TextDelta,
    TokenDelta,
    TokenSource,
)
from cluster.metrics.serving_meter import ServingMeter
from cluster.text.chat_template import ChatMessage, ChatTemplate
from cluster.text.choice import CompletionBuilder, RequestText
from cluster.text.prompts import Prompt, PromptEncoder
from cluster.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

# From here on (about 5 ms of encoding) a text is encoded in a thread, so that other streams do not notice.
_LONG_TEXT = 16_384


class Completer:
    """Prepares requests, runs them and turns their tokens into text. `meter` has measured all that it ran."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None,
        source: TokenSource,
        max_model_len: int,  # tokens a sequence may have, prompt and output together
        vocab_size: int | None = None,  # of the model; default: the tokenizer's
        meter: ServingMeter | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.encoder = PromptEncoder(
            tokenizer, chat_template, max_model_len, tokenizer.vocab_size if vocab_size is None else vocab_size
        )
        self._source = source
        self.meter = meter or ServingMeter()

    async def prepare(
        self,
        request_id: str,
        prompt: Prompt,
        sampling: SamplingParams,
        field: str = "prompt",
        *,
        default_max_tokens: int | None = None,
        options: RequestOptions | None = None,
    ) -> GenerationRequest:
        """Check a raw prompt. Raises `InvalidRequest` for all that can be wrong; the engine has seen nothing."""
        size = len(prompt) if isinstance(prompt, str) else 0
        token_ids = await _aside(size, lambda: self.encoder.encode(prompt, field))
        return self.encoder.check(
            request_id, token_ids, sampling, field, default_max_tokens=default_max_tokens, options=options
        )

    async def prepare_chat(
        self,
        request_id: str,
        messages: Sequence[ChatMessage],
        sampling: SamplingParams,
        options: RequestOptions | None = None,
    ) -> GenerationRequest:
        """Check a conversation, as `prepare` does a prompt."""
        size = sum(len(message["content"]) for message in messages)
        token_ids = await _aside(size, lambda: self.encoder.encode_chat(messages))
        return self.encoder.check(request_id, token_ids, sampling, "messages", options=options)

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[TextDelta, None]:
        """The text of a prepared request as it comes; the last delta of each choice has a `finish_reason`.

        Leaving the iteration (aclose, cancellation) aborts what still runs. Raises `Overloaded` or `Unavailable`
        before the first delta, `GenerationFailed` or `Unavailable` later.
        """
        texts = RequestText(request, self.tokenizer)
        watch = self.meter.watch()
        # A source's stream has to be left by closing it, and only a generator can be.
        tokens = cast(AsyncGenerator[TokenDelta, None], self._source.stream(request))
        async with aclosing(tokens):
            async for delta in tokens:
                text = texts.push(delta)
                if text is None:
                    continue
                watch.gained(text.choice, len(text.token_ids))
                if texts.finished:
                    watch.finished()
                if text.finish_reason is not None and delta.finish_reason is None:
                    await self._finish_choice(request.request_id, delta.choice)
                yield text
                if texts.finished:
                    return
        raise GenerationFailed("the engine ended the stream before every choice had finished")

    async def complete(self, request: GenerationRequest) -> Completion:
        """The whole text of a prepared request. Cancelling it aborts. Raises as `stream` does."""
        builder = CompletionBuilder(request)
        async with aclosing(self.stream(request)) as deltas:
            async for delta in deltas:
                builder.add(delta)
        return builder.completion()

    async def _finish_choice(self, request_id: str, choice: int) -> None:
        """A failure here costs surplus tokens, which are dropped; the text is complete all the same."""
        try:
            await self._source.finish_choice(request_id, choice)
        except ShardserveError as error:
            _log.warning("choice %d of %s could not be ended early: %s", choice, request_id, error)


async def _aside(size: int, encode: Callable[[], tuple[int, ...]]) -> tuple[int, ...]:
    return encode() if size < _LONG_TEXT else await asyncio.to_thread(encode)
