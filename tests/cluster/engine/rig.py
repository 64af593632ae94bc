"""An engine core on a scripted executor, turned by hand: what every test of the engine looks at.

After each turn it checks what must always hold: blocks and queues agree, the ranks' mirror equals the driver's
state, the first sequence in order makes progress, nothing is shared across salts, and no choice gets a delta after
its last. Ranks that die are restarted.
"""

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

from cluster.engine.block_hashing import BlockHash, digest
from cluster.engine.config import EngineConfig
from cluster.engine.core import EngineCore
from cluster.engine.executor import Capacity, ExecutorFailed
from cluster.engine.prefix_cache import PrefixCache
from cluster.generation import FinishReason, GenerationRequest, SamplingParams, TokenDelta, TokenLogprob
from tests.cluster.engine.mirrors import MirroringExecutor, check_mirror
from tests.fakes.scripted_executor import NextToken, count_up

Key = tuple[str, int]  # request id, choice


def make_request(
    request_id: str,
    num_prompt_tokens: int,
    max_tokens: int | None,
    *,
    first: int = 1,
    priority: int = 0,
    salt: str | None = None,
    **sampling: Any,
) -> GenerationRequest:
    """A prompt that counts up from `first`."""
    prompt = tuple(range(first, first + num_prompt_tokens))
    params = SamplingParams(max_tokens=max_tokens, **sampling)
    return GenerationRequest(request_id, prompt, params, priority=priority, cache_salt=salt)


def counted(request: GenerationRequest) -> list[int]:
    """What the counter model answers, when nothing but max_tokens ends it."""
    start = request.prompt_token_ids[-1] + 1
    return list(range(start, start + (request.sampling.max_tokens or 0)))


def _scripted(tokens: Sequence[int], start: int, end: int, num_top: int) -> tuple[TokenLogprob, ...]:
    """What the scripted ranks say of the tokens [start, end)."""
    return tuple(
        TokenLogprob(
            token_id,
            -float(token_id * 1024 + position),
            tuple((token_id + rank, -float(position + rank)) for rank in range(num_top)),
        )
        for position, token_id in enumerate(tokens[start:end], start)
    )


class Rig:
    def __init__(
        self,
        *,
        depth: int,
        num_blocks: int = 64,
        block_size: int = 4,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 16,
        max_model_len: int = 1000,
        eos_token_ids: tuple[int, ...] = (),
        next_token: NextToken = count_up,
        prefix_cache: bool = True,
        block_hash: BlockHash = digest,
    ) -> None:
        self.config = EngineConfig(
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_steps_in_flight=depth,
            prefix_cache=prefix_cache,
            eos_token_ids=eos_token_ids,
        )
        self.executor = MirroringExecutor(
            Capacity(num_blocks, block_size),
            next_token,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        self.core = EngineCore(self.executor, self.config, clock=lambda: float(len(self.executor.executed)))
        self.core.scheduler.prefix_cache = PrefixCache(self.core.pool, prefix_cache, block_hash)
        self.asked: list[GenerationRequest] = []  # by sequence id
        self.requests: dict[str, GenerationRequest] = {}
        self.cached: dict[Key, int] = {}  # as the first delta says
        self.tokens: dict[Key, list[int]] = {}
        self.reasons: dict[Key, FinishReason] = {}
        self._num_tokens = 0  # in `tokens`
        self._last_progress: tuple[object, int] = (None, 0)

    def add(self, *requests: GenerationRequest) -> None:
        for request in requests:
            self.core.add(request)
            self.asked += [request] * request.sampling.n
            self.requests[request.request_id] = request

    def abort(self, request_id: str, choice: int | None = None) -> None:
        self._collect(self.core.end(request_id, choice, FinishReason.ABORT))

    def lose_ranks(self) -> None:
        """As the engine does on a failure. `resume` must follow."""
        self.core.lose_ranks()
        self.core.check_integrity()
        assert self.core.stats().free_blocks == self.core.stats().total_blocks

    def resume(self) -> None:
        self.executor.restart(threading.Event())
        self.core.resume()

    def turn(self) -> list[TokenDelta]:
        try:
            deltas = self.core.finish_step(self.core.plan_step())
        except ExecutorFailed:
            deltas = []
            self.lose_ranks()
            self.resume()
        self._collect(deltas)
        self.core.check_integrity()
        self._check_counts()
        check_mirror(self.core.scheduler, self.executor.rank)
        self._check_salts()
        self._check_progress()
        return deltas

    def run_until_idle(self, limit: int = 5000) -> int:
        """How many turns it took."""
        for turns in range(limit):
            if self.core.idle:
                return turns
            self.turn()
        raise AssertionError(f"not idle after {limit} turns: {self.core.stats()}")

    def run_until_first_token(self, request_id: str, limit: int = 5000) -> int:
        for turns in range(limit):
            if self.tokens.get((request_id, 0)):
                return turns
            self.turn()
        raise AssertionError(f"no token of {request_id} after {limit} turns")

    def assert_nothing_left(self) -> None:
        stats = self.core.stats()
        assert self.core.idle
        assert (stats.running, stats.waiting, stats.waiting_requests) == (0, 0, 0)
        assert stats.free_blocks == stats.total_blocks
        assert len(self.reasons) == stats.received
        assert self._num_tokens == sum(map(len, self.tokens.values()))
        assert self.executor.mirror == {}
        assert len(self.executor.rank) == 0

    def _collect(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            key = (delta.request_id, delta.choice)
            assert key not in self.reasons, f"a delta of {key} after its last"
            assert delta.num_cached_tokens == 0 or key not in self.tokens, f"{key} is told twice what was cached"
            self._check_logprobs(delta)
            self.cached.setdefault(key, delta.num_cached_tokens)
            self.tokens.setdefault(key, []).extend(delta.token_ids)
            self._num_tokens += len(delta.token_ids)
            if delta.finish_reason is not None:
                self.reasons[key] = delta.finish_reason

    def _check_logprobs(self, delta: TokenDelta) -> None:
        """Those of each token with the token, those of the prompt with the first token and never again."""
        request = self.requests[delta.request_id]
        asked, prompt = request.sampling, request.prompt_token_ids
        before = self.tokens.get((delta.request_id, delta.choice), [])
        tokens = (*prompt, *before, *delta.token_ids)
        start = len(prompt) + len(before)
        expected = () if asked.logprobs is None else _scripted(tokens, start, len(tokens), asked.logprobs)
        assert delta.logprobs == expected
        begins = not before and (bool(delta.token_ids) or delta.finish_reason is FinishReason.LENGTH)
        due = asked.prompt_logprobs is not None and begins
        of_prompt = (None, *_scripted(tokens, 1, len(prompt), asked.prompt_logprobs or 0)) if due else None
        assert delta.prompt_logprobs == of_prompt

    def _check_counts(self) -> None:
        """What a scrape would say now is what has happened."""
        stats = self.core.stats()
        assert stats.received == len(self.asked) == stats.running + stats.waiting + sum(stats.finished.values())
        assert Counter(self.reasons.values()) == +Counter(stats.finished)
        assert stats.generation_tokens == self._num_tokens
        assert stats.prompt_tokens == sum(len(request.prompt_token_ids) for request in self.requests.values())

    def _check_salts(self) -> None:
        for reader, writer in self.executor.reads:
            salts = self.asked[reader].cache_salt, self.asked[writer].cache_salt
            assert salts[0] == salts[1], f"sequence {reader} reads what {writer} has written, with salts {salts}"
        self.executor.reads.clear()

    def _check_progress(self) -> None:
        scheduler = self.core.scheduler
        live = [*scheduler.running, *scheduler.waiting]
        if not live:
            self._last_progress = (None, 0)
            return
        first = min(live, key=lambda sequence: sequence.order)
        now = (first.sequence_id, len(first.token_ids), first.num_computed_tokens)
        before, count = self._last_progress
        self._last_progress = (now, count + 1 if now == before else 0)
        assert self._last_progress[1] <= self.config.max_steps_in_flight, f"the first sequence is stuck: {now}"
