"""A driver over a scripted worker group, in this process: what the tests of both ends of a subscription share."""

import asyncio
from collections.abc import AsyncIterator, Callable

from cluster.config import ClusterConfig
from cluster.driver.driver import Driver, StartedGroup
from cluster.driver.status import ServedModel
from cluster.engine.executor import Capacity
from cluster.generation import GenerationRequest, SamplingParams, TokenDelta
from tests.fakes.scripted_executor import VOCAB_SIZE, ScriptedExecutor

MODEL = ServedModel("counter", "/models/counter", max_model_len=512, vocab_size=VOCAB_SIZE, eos_token_ids=())


class DriverRig:
    """Makes drivers; `exits` has the codes with which they ended their process."""

    def __init__(self) -> None:
        self.exits: list[int] = []
        self.group_failure: str | None = None

    async def start(self, executor: ScriptedExecutor | None = None, **settings: object) -> Driver:
        executor = executor or scripted()
        config = ClusterConfig.parse({"model": "counter", **settings})
        driver = Driver(
            config,
            lambda _: StartedGroup(executor, MODEL, lambda: self.group_failure),
            exit_process=self.exits.append,
        )
        await driver.start()
        return driver


def scripted(**options: object) -> ScriptedExecutor:
    return ScriptedExecutor(Capacity(num_blocks=256, block_size=4), **options)  # type: ignore[arg-type]


def count_from(
    start: int, tokens: int, request_id: str = "", n: int = 1, temperature: float = 0.0
) -> GenerationRequest:
    """A request that the counter model answers with start + 1, start + 2, ..."""
    sampling = SamplingParams(max_tokens=tokens, temperature=temperature, n=n)
    return GenerationRequest(request_id or f"from-{start}", (start,), sampling)


async def tokens(deltas: AsyncIterator[TokenDelta]) -> list[int]:
    return [token async for delta in deltas for token in delta.token_ids]


async def eventually(condition: Callable[[], bool]) -> None:
    """Within a time that only guards against hanging."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)
