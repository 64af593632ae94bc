"""A `TokenSource` that says what a test tells it to, and remembers what was asked of it.

Works as the real ones do: it refuses before the first delta, ends a choice at its `max_tokens`, at EOS and at stop
tokens, and counts what was aborted. It goes on only when its reader does, so a test decides what is queued.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from cluster.errors import GenerationFailed, ShardserveError
from cluster.generation import FinishReason, GenerationRequest, TokenDelta, TokenLogprob
from tests.fakes.byte_tokenizer import EOS_ID

Script = Callable[[GenerationRequest, int], Sequence[int]]  # request, choice -> token ids


def says(*texts: str) -> Script:
    """Choice i says text i (the last one for all further choices), then EOS."""
    return lambda request, choice: [*texts[min(choice, len(texts) - 1)].encode(), EOS_ID]


def counts(request: GenerationRequest, choice: int) -> Sequence[int]:
    """Bytes that count up from the last token of the prompt, in a circle: lost or repeated tokens show."""
    start = request.prompt_token_ids[-1] + 1 + choice
    return [(start + step) % 256 for step in range(request.sampling.max_tokens or 0)]


def logprob_of(token_id: int, num_top: int) -> TokenLogprob:
    """Told from the token alone: it is the likeliest, but for multiples of 7, which are the second."""
    logprob = -(token_id % 16) / 16 - 0.25
    likelier = [(token_id + 1, logprob / 2)] if token_id % 7 == 0 else []
    others = [(token_id + 2 + step, logprob - 1 - step) for step in range(num_top)]
    return TokenLogprob(token_id, logprob, tuple([*likelier, (token_id, logprob), *others][:num_top]))


@dataclass
class ScriptedSource:
    """Implements `cluster.generation.TokenSource`."""

    script: Script = counts
    burst: int = 1  # tokens in one delta
    num_cached_tokens: int = 0  # of every prompt
    refuse_with: ShardserveError | None = None
    refuse_when: Callable[[GenerationRequest], bool] = lambda request: True
    fail_after: int | None = None  # deltas of one request, then GenerationFailed
    fail_with: Exception = field(default_factory=lambda: GenerationFailed("rank 1 ended with exit code 3"))
    pause_after: int | None = None  # deltas of one request, then nothing more until `resume` is set
    resume: asyncio.Event = field(default_factory=asyncio.Event)
    requests: list[GenerationRequest] = field(default_factory=list)
    running: dict[str, set[int]] = field(default_factory=dict)  # request -> its open choices
    aborted: list[str] = field(default_factory=list)
    finished_choices: list[tuple[str, int]] = field(default_factory=list)

    async def stream(self, request: GenerationRequest) -> AsyncIterator[TokenDelta]:
        self.requests.append(request)
        await asyncio.sleep(0)
        if self.refuse_with is not None and self.refuse_when(request):
            raise self.refuse_with
        open_choices = self.running[request.request_id] = set(range(request.sampling.n))
        try:
            for number, delta in enumerate(self._deltas(request)):
                if number == self.fail_after:
                    open_choices.clear()
                    raise self.fail_with
                if number == self.pause_after:
                    await self.resume.wait()
                await asyncio.sleep(0)  # as between two steps of an engine
                if delta.choice in open_choices:
                    if delta.finish_reason is not None:
                        open_choices.discard(delta.choice)
                    yield delta
            open_choices.clear()
        finally:
            del self.running[request.request_id]
            if open_choices:
                self.aborted.append(request.request_id)

    async def finish_choice(self, request_id: str, choice: int) -> None:
        self.finished_choices.append((request_id, choice))
        self.running[request_id].discard(choice)

    def _deltas(self, request: GenerationRequest) -> list[TokenDelta]:
        """All deltas, the choices taking turns."""
        choices = [self._choice(request, choice) for choice in range(request.sampling.n)]
        longest = max(map(len, choices))
        return [deltas[turn] for turn in range(longest) for deltas in choices if turn < len(deltas)]

    def _choice(self, request: GenerationRequest, choice: int) -> list[TokenDelta]:
        sampling = request.sampling
        ids = list(self.script(request, choice))[: sampling.max_tokens]
        ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else {EOS_ID})
        end = next((at for at, token_id in enumerate(ids) if token_id in ends), None)
        reason = FinishReason.LENGTH if end is None else FinishReason.STOP
        ids = ids if end is None else ids[: end + 1]
        parts = [tuple(ids[at : at + self.burst]) for at in range(0, len(ids), self.burst)]
        if sampling.max_tokens == 0:
            parts = [()]
        last = len(parts) - 1
        return [
            TokenDelta(
                request.request_id,
                choice,
                part,
                reason if at == last else None,
                logprobs=_logprobs(part, sampling.logprobs),
                prompt_logprobs=_prompt_logprobs(request) if at == 0 else None,
                num_cached_tokens=self.num_cached_tokens if at == 0 else 0,
            )
            for at, part in enumerate(parts)
        ]


def _logprobs(token_ids: Sequence[int], num_top: int | None) -> tuple[TokenLogprob, ...]:
    return () if num_top is None else tuple(logprob_of(token_id, num_top) for token_id in token_ids)


def _prompt_logprobs(request: GenerationRequest) -> tuple[TokenLogprob | None, ...] | None:
    num_top = request.sampling.prompt_logprobs
    return None if num_top is None else (None, *_logprobs(request.prompt_token_ids[1:], num_top))
