"""One rank in this process: no Ray, no sockets. For `LLM` at TP=1 and for Serve's local testing mode.

Loads torch when a group is started, not before. Knows a runner and its plans; knows nothing of requests.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from cluster.config import ClusterConfig
from cluster.driver.driver import StartedGroup
from cluster.driver.resolution import ModelFiles, fit, resolve_device, worker_config
from cluster.driver.sizing import RankMemory
from cluster.engine.executor import Capacity, ExecutorFailed
from cluster.errors import InvalidConfig, StartupFailed
from model_shards.errors import ModelError
from workers.device import check_gpu, set_threads, threads_per_rank, torch_dtype, visible_gpus
from workers.errors import WorkerError
from workers.protocol import StepPlan, StepResult

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from model_shards.registry import Model
    from workers.runner import Runner

logger = logging.getLogger(__name__)


class LocalExecutor:
    """Runs a plan when its result is taken, on the engine's thread. A restart keeps the weights."""

    def __init__(self, new_runner: "Callable[[], Runner]", capacity: Capacity) -> None:
        self._new_runner = new_runner
        self._runner: Runner | None = new_runner()
        self.incarnation = 0
        self.capacity = capacity
        self._plans: deque[StepPlan] = deque()

    def submit(self, plan: StepPlan) -> None:
        self._plans.append(plan)

    def take_result(self, timeout_s: float) -> StepResult:
        if self._runner is None or not self._plans:
            raise ExecutorFailed("no step is in flight")
        try:
            return self._runner.execute(self._plans.popleft())
        except WorkerError as error:
            raise ExecutorFailed(str(error)) from error

    def restart(self, cancelled: threading.Event) -> Mapping[str, float]:
        started = time.monotonic()
        self.stop()  # its KV memory goes before the new one comes
        try:
            self._runner = self._new_runner()
        except WorkerError as error:
            raise ExecutorFailed(str(error)) from error
        self.incarnation += 1
        return {"allocate": time.monotonic() - started}

    def stop(self) -> None:
        self._runner = None
        self._plans.clear()


def start_local_group(config: ClusterConfig) -> StartedGroup:
    """Load the whole model into this process. Raises `InvalidConfig` or `StartupFailed`."""
    if config.tensor_parallel_size != 1:
        raise InvalidConfig(f"one process holds one rank, not tensor_parallel_size {config.tensor_parallel_size}")
    if config.spare:
        raise InvalidConfig("spare: a rank in this process cannot be replaced by another process")
    try:
        return _start(config)
    except (ModelError, WorkerError) as error:
        raise StartupFailed(str(error)) from error


def _start(config: ClusterConfig) -> StartedGroup:
    import torch

    from model_shards.group import SingleRank
    from model_shards.weights.loader import load_model
    from workers.kv_cache import bytes_per_block
    from workers.lack_of_memory import memory_for
    from workers.memory_profile import profile_memory
    from workers.runner import Runner

    device = resolve_device(config.device, ranks=1, count_gpus=visible_gpus)
    check_gpu(device)
    files = ModelFiles.of(config.model)
    worker = worker_config(config, files, device, threads_per_rank(1))
    if device == "cpu":
        set_threads(worker.num_threads)
    group = SingleRank()
    with memory_for("the weights", device):
        model = load_model(
            files.path,
            group,
            device=torch.device(device),
            dtype=torch_dtype(worker.dtype),
            batch_invariant=worker.batch_invariant,
        )
    if worker.shard_proof:
        _prove(model, files.path, torch_dtype(worker.dtype))
    found = profile_memory(model, worker)
    block_bytes = bytes_per_block(model, worker.block_size, worker.dtype)
    memory = RankMemory("here", found.free, block_bytes, found.total, found.activations)
    num_blocks, served = fit(config, files, worker, [memory])

    def new_runner() -> Runner:
        with memory_for(f"{num_blocks} KV blocks", device):
            return Runner(model, group, worker, num_blocks)

    executor = LocalExecutor(new_runner, Capacity(num_blocks, worker.block_size))
    return StartedGroup(executor, served, failure=lambda: None)


def _prove(model: "Model", path: "Path", dtype: "torch.dtype") -> None:
    """Raises `StartupFailed` unless what is in memory is what the files have."""
    from model_shards.weights.file_sums import differing, file_sums
    from model_shards.weights.holdings import holdings_of
    from model_shards.weights.proof import refusal, unproved

    holdings = holdings_of(model, path, rank=0)
    wrong = unproved([holdings], file_sums(path, dtype, share=0, num_shares=1))
    if wrong:
        raise StartupFailed(refusal(wrong, {"this process": differing(holdings, wrong, path, dtype)}))
