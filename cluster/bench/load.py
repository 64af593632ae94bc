"""Closed- and open-loop load on one server, level by level, each bounded by time.

Knows when requests start; leaves one request to `streaming` and figures to `summary`.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace

import httpx

from cluster.bench.prompts import random_words, words_for_tokens
from cluster.bench.streaming import CompletionRequest, Sample, stream_completion
from cluster.bench.summary import LevelSummary, summarize
from cluster.bench.worker_time import wait_share, worker_seconds
from cluster.errors import InvalidConfig, StartupFailed

_WARM_UP_INDEX = 1_000_000_000  # far from the measured requests' indices, so that no prompt is sent twice
_CONNECT_TIMEOUT_S = 10.0

Send = Callable[[CompletionRequest, float | None], Coroutine[None, None, None]]  # the request, and when it was due


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """What to measure. Either a closed loop for each of `concurrency`, or one open loop at `rate`."""

    url: str
    model: str | None = None  # None: the first that /v1/models names
    concurrency: tuple[int, ...] = (1, 8, 32)
    rate: float | None = None  # requests per second, Poisson arrivals
    requests: int | None = None  # per level; default: 4 alone, else 3 for each slot
    input_len: int = 128
    output_len: int = 64
    ignore_eos: bool = True
    seed: int = 0
    level_limit_s: float = 300.0
    request_limit_s: float = 120.0  # longest silence of a stream

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise InvalidConfig(f"URL must start with http:// or https://, not {self.url!r}")
        for name in ("input_len", "output_len", "requests"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidConfig(f"{name} must be at least 1, not {value}")
        if self.rate is None and (not self.concurrency or min(self.concurrency) < 1):
            raise InvalidConfig(f"concurrency needs levels of at least 1, not {list(self.concurrency)}")
        if self.rate is not None and not 0 < self.rate <= 10_000:
            raise InvalidConfig(f"rate must be above 0 and at most 10000 requests/s, not {self.rate}")
        if self.level_limit_s <= 0 or self.request_limit_s <= 0:
            raise InvalidConfig("time limits must be above 0 s")

    def requests_at(self, concurrency: int) -> int:
        return self.requests or (4 if concurrency == 1 else 3 * concurrency)


@dataclass(frozen=True, slots=True)
class _Template:
    """What the server turned out to support, and the prompt length in words."""

    request: CompletionRequest
    words: int

    def request_at(self, seed: int, index: int) -> CompletionRequest:
        return replace(self.request, prompt=random_words(seed, index, self.words))


async def measure(plan: BenchPlan) -> AsyncIterator[tuple[str, LevelSummary]]:
    """Yield (model, figures) level by level. Raises `StartupFailed` when the server cannot be used at all."""
    levels = 1 if plan.rate is not None else len(plan.concurrency)
    async with _client(plan) as client:
        model = plan.model or await _first_model(client)
        template = await _warm_up(client, plan, model)
        first_index = 0
        for level in range(levels):
            count = plan.requests or 32 if plan.rate is not None else plan.requests_at(plan.concurrency[level])
            requests = [template.request_at(plan.seed, first_index + i) for i in range(count)]
            first_index += count
            yield model, await _run_level(client, plan, level, requests)


def _client(plan: BenchPlan) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=plan.url.rstrip("/").removesuffix("/v1"),
        timeout=httpx.Timeout(plan.request_limit_s, connect=_CONNECT_TIMEOUT_S, pool=None),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        trust_env=False,  # a proxy of the environment has no place between a load generator and its server
    )


async def _first_model(client: httpx.AsyncClient) -> str:
    try:
        response = await client.get("/v1/models")
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        cause = f"{type(error).__name__}: {error}".strip().rstrip(":")
        raise StartupFailed(
            f"{client.base_url}: /v1/models gives no model ({cause}); name one with --model"
        ) from None


async def _warm_up(client: httpx.AsyncClient, plan: BenchPlan, model: str) -> _Template:
    """Two requests that learn whether usage is reported and how many words make the wanted prompt length."""
    request = CompletionRequest(model=model, prompt="", max_tokens=2, ignore_eos=plan.ignore_eos)
    trials: list[tuple[int, int]] = []
    for trial, words in enumerate((max(1, plan.input_len // 4), max(2, plan.input_len // 2))):
        attempt = replace(request, prompt=random_words(plan.seed, _WARM_UP_INDEX + trial, words))
        sample = await stream_completion(client, attempt)
        if sample.failure is not None and "stream_options" in sample.failure:
            request = replace(request, include_usage=False)
            sample = await stream_completion(client, replace(attempt, include_usage=False))
        if sample.failure is not None:
            raise StartupFailed(f"{client.base_url}: a first request failed: {sample.failure}")
        trials.append((words, sample.prompt_tokens or 0))
    return _Template(replace(request, max_tokens=plan.output_len), words_for_tokens(plan.input_len, trials))


async def _run_level(
    client: httpx.AsyncClient, plan: BenchPlan, level: int, requests: Sequence[CompletionRequest]
) -> LevelSummary:
    async def send(request: CompletionRequest, due: float | None) -> None:
        samples.append(await stream_completion(client, request, started=due))

    samples: list[Sample] = []
    worked_before = await worker_seconds(client)
    started = time.perf_counter()
    if plan.rate is not None:
        load = f"{plan.rate:g} requests/s"
        work = open_loop(requests, arrival_offsets(plan.rate, len(requests), plan.seed), send)
    else:
        load = f"{plan.concurrency[level]} at once"
        work = closed_loop(requests, plan.concurrency[level], send)
    try:
        async with asyncio.timeout(plan.level_limit_s):
            await work
    except TimeoutError:
        pass  # what ran is cancelled and counted as unfinished
    duration_s = time.perf_counter() - started
    return summarize(
        load,
        samples,
        duration_s=duration_s,
        unfinished=len(requests) - len(samples),
        worker_wait_share=wait_share(worked_before, await worker_seconds(client)),
    )


async def closed_loop(
    requests: Sequence[CompletionRequest],
    concurrency: int,
    send: Send,
) -> None:
    """Keep `concurrency` requests in flight until all have been sent and answered."""

    async def slot(queue: Iterator[CompletionRequest]) -> None:
        for request in queue:
            await send(request, None)

    queue = iter(requests)
    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(requests))):
            group.create_task(slot(queue))


async def open_loop(
    requests: Sequence[CompletionRequest],
    offsets: Sequence[float],
    send: Send,
) -> None:
    """Start each request at its offset in seconds, whether or not earlier ones have been answered."""
    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for request, offset in zip(requests, offsets, strict=True):
            due = started + offset
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            group.create_task(send(request, due))


def arrival_offsets(rate: float, count: int, seed: int) -> list[float]:
    """Seconds from the start at which `count` requests of a Poisson process arrive; the first at once."""
    draws = random.Random(f"arrivals/{seed}")
    offsets = [0.0]
    while len(offsets) < count:
        offsets.append(offsets[-1] + draws.expovariate(rate))
    return offsets
