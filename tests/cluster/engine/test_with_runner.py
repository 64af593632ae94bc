"""The engine on a real rank in this process: under pressure for blocks, every output is bit for bit its own.

The scripted tests know what a rank must do; this one knows that the runner does it. Greedy and seeded rows, two
choices, chunked prompts and preemptions share the steps.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cluster.config import ClusterConfig
from cluster.driver.local_executor import start_local_group
from cluster.engine.config import EngineConfig
from cluster.engine.core import EngineCore
from cluster.engine.executor import Capacity
from cluster.generation import GenerationRequest, SamplingParams
from tests.cluster.engine.rig import Key
from tests.fakes.checkpoints import write_tiny_llama

_MAX_MODEL_LEN = 64
_NUM_BLOCKS = 20  # of 4 tokens: room for two of the longest


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(autouse=True)
def few_threads() -> Iterator[None]:
    """Threads of one operation wait for each other by spinning: on a busy machine that takes seconds a step."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def requests() -> list[GenerationRequest]:
    return [
        GenerationRequest(
            f"r{i}",
            tuple((i * 37 + j * 11) % 200 + 1 for j in range(5 + 7 * (i % 3))),
            SamplingParams(max_tokens=20, temperature=float(i % 2), seed=i, n=1 + i % 2),
        )
        for i in range(6)
    ]


def start(checkpoint: Path, depth: int) -> EngineCore:
    sizes = {"max_model_len": _MAX_MODEL_LEN, "max_num_seqs": 8, "max_num_batched_tokens": 16}
    settings = {"device": "cpu", "dtype": "float32", "block_size": 4, "kv_cache_memory": "16MiB"}
    executor = start_local_group(ClusterConfig.parse({"model": str(checkpoint), **settings, **sizes})).executor
    torch.set_num_threads(1)
    executor.capacity = Capacity(_NUM_BLOCKS, 4)  # type: ignore[misc]
    limits = EngineConfig(
        max_model_len=_MAX_MODEL_LEN, max_num_seqs=8, max_num_batched_tokens=16, max_steps_in_flight=depth
    )
    return EngineCore(executor, limits, clock=lambda: 0.0)


def run(core: EngineCore, asked: list[GenerationRequest]) -> dict[Key, list[int]]:
    """The tokens of each choice."""
    tokens: dict[Key, list[int]] = {}
    for request in asked:
        core.add(request)
    while not core.idle:
        for delta in core.finish_step(core.plan_step()):
            tokens.setdefault((delta.request_id, delta.choice), []).extend(delta.token_ids)
    core.check_integrity()
    assert core.pool.num_free == _NUM_BLOCKS
    return tokens


def test_outputs_together_are_the_outputs_alone(checkpoint: Path, depth: int) -> None:
    core = start(checkpoint, depth)
    alone: dict[Key, list[int]] = {}
    for request in requests():
        alone |= run(core, [request])
    assert core.stats().preemptions == 0
    assert run(core, requests()) == alone
    assert core.stats().preemptions > 0
