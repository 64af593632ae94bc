"""The engine on real ranks in this process: under pressure for blocks every output is its own, and what is found
in the prefix cache gives the logits that computing it gives, bit for bit.

The scripted tests know what a rank must do; this one knows that the runner does it. Greedy and seeded rows, two
choices, chunked prompts and preemptions share the steps.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.config import ClusterConfig
from cluster.driver.local_executor import LocalExecutor, start_local_group
from cluster.engine.config import EngineConfig
from cluster.engine.core import EngineCore
from cluster.engine.executor import Capacity
from cluster.generation import FinishReason, GenerationRequest, SamplingParams, TokenDelta
from model_shards.weights.loader import load_model
from tests.cluster.engine.rig import Key
from tests.fakes.checkpoints import write_tiny_llama
from tests.fakes.thread_group import ThreadGroup, run_ranks
from tests.workers.plans import worker_config
from workers.runner import Runner

_MAX_MODEL_LEN = 64
_NUM_BLOCKS = 20  # of 4 tokens: room for two of the longest


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


def requests() -> list[GenerationRequest]:
    return [
        GenerationRequest(
            f"r{i}",
            tuple((i * 37 + j * 11) % 200 + 1 for j in range(5 + 7 * (i % 3))),
            SamplingParams(max_tokens=20, temperature=float(i % 2), seed=i, n=1 + i % 2),
        )
        for i in range(6)
    ]


def start(checkpoint: Path, depth: int, prefix_cache: bool = True) -> EngineCore:
    sizes = {"max_model_len": _MAX_MODEL_LEN, "max_num_seqs": 8, "max_num_batched_tokens": 16}
    settings = {"device": "cpu", "dtype": "float32", "block_size": 4, "kv_cache_memory": "16MiB"}
    executor = start_local_group(ClusterConfig.parse({"model": str(checkpoint), **settings, **sizes})).executor
    torch.set_num_threads(1)  # it has set as many as there are cores
    executor.capacity = Capacity(_NUM_BLOCKS, 4)  # type: ignore[misc]
    limits = EngineConfig(
        max_model_len=_MAX_MODEL_LEN,
        max_num_seqs=8,
        max_num_batched_tokens=16,
        max_steps_in_flight=depth,
        prefix_cache=prefix_cache,
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


def demanding_requests() -> list[GenerationRequest]:
    """Case 46: 6 requests of 60 tokens with penalties, seeds and log-probabilities, for blocks that hold one."""
    adjusted: list[dict[str, Any]] = [
        {"repetition_penalty": 1.4, "presence_penalty": 0.5},
        {"frequency_penalty": 1.2, "min_p": 0.02, "logit_bias": ((7, 4.0), (9, -3.0))},
        {"min_tokens": 30, "stop_token_ids": tuple(range(0, 1003, 2)), "top_k": 40},
    ]
    return [
        GenerationRequest(
            f"r{i}",
            tuple((i * 31 + j * 17) % 300 + 1 for j in range(20)),
            SamplingParams(
                max_tokens=40,
                temperature=0.8 * (i % 2),
                seed=i,
                logprobs=2,
                prompt_logprobs=i % 3,
                **adjusted[i % 3],
            ),
            bad_words_ids=((5,), (11, 12)) if i == 4 else (),
        )
        for i in range(6)
    ]


def deltas_of(core: EngineCore, asked: list[GenerationRequest]) -> dict[str, list[TokenDelta]]:
    """Of each request, one after the other."""
    deltas: dict[str, list[TokenDelta]] = {request.request_id: [] for request in asked}
    for request in asked:
        core.add(request)
    while not core.idle:
        for delta in core.finish_step(core.plan_step()):
            deltas[delta.request_id].append(replace(delta, num_cached_tokens=0))
    core.check_integrity()
    return deltas


def test_penalties_and_log_probabilities_under_pressure_are_those_alone(checkpoint: Path, depth: int) -> None:
    core = start(checkpoint, depth)
    alone: dict[str, list[TokenDelta]] = {}
    for request in demanding_requests():
        alone |= deltas_of(core, [request])
    assert core.stats().preemptions == 0
    assert deltas_of(core, demanding_requests()) == alone  # bit for bit
    assert core.stats().preemptions > 0
    for deltas in alone.values():
        assert [len(delta.prompt_logprobs or ()) for delta in deltas] == [20] + [0] * (len(deltas) - 1)
        assert all(len(delta.logprobs) == len(delta.token_ids) == 1 for delta in deltas)
    stopped = alone["r2"] + alone["r5"]
    assert sum(delta.finish_reason is FinishReason.STOP for delta in stopped) == 2
    assert 62 <= len(stopped) < 80


def test_outputs_together_are_the_outputs_alone(checkpoint: Path, depth: int) -> None:
    core = start(checkpoint, depth, prefix_cache=False)
    alone: dict[Key, list[int]] = {}
    for request in requests():
        alone |= run(core, [request])
    assert core.stats().preemptions == 0
    assert run(core, requests()) == alone
    assert core.stats().preemptions > 0
    cached = start(checkpoint, depth)
    assert run(cached, requests()) == alone
    assert run(cached, requests()) == alone
    assert cached.stats().preemptions > 0
    assert cached.stats().prefix_cache_hits > 0


@dataclass
class Recorded:
    core: EngineCore
    rows: list[torch.Tensor]

    def logits_of(self, request: GenerationRequest) -> torch.Tensor:
        """Of each token that it gains when nothing else runs."""
        self.rows.clear()
        run(self.core, [request])
        return torch.cat(self.rows)


def start_rank(checkpoint: Path, depth: int, prefix_cache: bool, group: ThreadGroup) -> Recorded:
    """One rank of several. Each has an engine of its own, which makes the same plans."""
    rows: list[torch.Tensor] = []
    model = load_model(checkpoint, group, device=torch.device("cpu"), dtype=torch.float32)
    local_logits = model.local_logits

    def recording(hidden: torch.Tensor) -> torch.Tensor:
        rows.append(local_logits(hidden))
        return rows[-1].clone()

    model.local_logits = recording  # type: ignore[method-assign]
    limits: dict[str, Any] = {"max_model_len": _MAX_MODEL_LEN, "max_num_seqs": 8, "max_num_batched_tokens": 16}
    config = worker_config(block_size=4, tensor_parallel_size=group.size, **limits)
    executor = LocalExecutor(lambda: Runner(model, group, config, _NUM_BLOCKS), Capacity(_NUM_BLOCKS, 4))
    settings = EngineConfig(**limits, max_steps_in_flight=depth, prefix_cache=prefix_cache)
    return Recorded(EngineCore(executor, settings, clock=lambda: 0.0), rows)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_hit_changes_no_bit_of_the_logits(checkpoint: Path, depth: int, num_ranks: int) -> None:
    prompt = tuple(j * 13 % 200 + 1 for j in range(38))
    request = GenerationRequest("r", prompt, SamplingParams(max_tokens=12, temperature=0, seed=0))

    def work(group: ThreadGroup) -> None:
        expected = start_rank(checkpoint, depth, False, group).logits_of(request)
        rank = start_rank(checkpoint, depth, True, group)
        for head in (9, 20, 38):  # a part of it is cached, more of it, all of it
            run(rank.core, [GenerationRequest("head", prompt[:head], SamplingParams(max_tokens=1))])
            hits = rank.core.stats().prefix_cache_hits
            assert torch.equal(rank.logits_of(request), expected)
            assert rank.core.stats().prefix_cache_hits - hits >= head // 4 * 4

    run_ranks(num_ranks, work)
