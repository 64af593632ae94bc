"""The Ray actors around a `Worker`: placement and life only, they carry no step.

Control calls have a concurrency group of their own, so they answer while `run` runs; the ref of `run` is how a
driver on another node hears that this process has ended. A driver imports this module for the classes alone, so
torch is loaded when an actor starts and not before.
"""

import logging
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import ray
import ray.util

from model_shards.weights.proof import Checksum, Holding
from workers.channel import WorkerEndpoint
from workers.config import WorkerConfig
from workers.device import take_gpu
from workers.reports import LoadReport, SpareReport, WorkerIdentity

if TYPE_CHECKING:
    from workers.worker import Worker


class _RankCalls:
    """A `Worker`'s methods as an actor's. Ray makes an actor of one class and takes its methods from all bases."""

    _worker: "Worker"
    _import_seconds: float

    def _become(self, rank: int, config: WorkerConfig) -> None:
        started = time.perf_counter()
        from workers.worker import Worker

        self._import_seconds = time.perf_counter() - started
        log_format = f"[rank {rank}] %(levelname)s %(name)s: %(message)s"
        logging.basicConfig(level=logging.INFO, format=log_format)
        if config.device == "cuda":
            take_gpu(ray.get_gpu_ids(), os.environ)
        self._worker = Worker(
            rank,
            config,
            node_id=ray.get_runtime_context().get_node_id(),
            node_ip=ray.util.get_node_ip_address(),
        )

    @ray.method(concurrency_group="control")
    def identify(self) -> WorkerIdentity:
        return replace(self._worker.identify(), import_seconds=self._import_seconds)

    def open_group(self, same_host: bool) -> str:
        return self._worker.open_group(same_host)

    def join_group(self, address: str) -> str:
        return self._worker.join_group(address)

    def load(self) -> LoadReport:
        return self._worker.load()

    def file_sums(self) -> dict[str, Checksum]:
        return self._worker.file_sums()

    def differing(self, tensors: tuple[str, ...]) -> tuple[Holding, ...]:
        return self._worker.differing(tensors)

    def allocate(self, num_blocks: int) -> None:
        self._worker.allocate(num_blocks)

    def run(self, endpoint: WorkerEndpoint) -> str:
        return self._worker.run(endpoint)

    @ray.method(concurrency_group="control")
    def stop(self) -> None:
        self._worker.stop()


@ray.remote(concurrency_groups={"control": 2})  # type: ignore[call-overload]  # the stubs do not know the option
class WorkerActor(_RankCalls):
    """A rank, from the start."""

    def __init__(self, rank: int, config: WorkerConfig) -> None:
        self._become(rank, config)


@ray.remote(concurrency_groups={"control": 2})  # type: ignore[call-overload]  # as above
class SpareActor(_RankCalls):
    """A rank to be: everything is imported, and nothing is done until a rank has died whose seat it takes.

    Importing makes no CUDA context, takes no GPU and starts no thread that computes.
    """

    def prepare(self, niceness: int) -> SpareReport:
        """Import what a rank needs, with no more than a small share of a busy CPU. Idempotent."""
        with ThreadPoolExecutor(1) as threads:  # a niceness cannot be taken back, but dies with its thread
            threads.submit(_import_all, niceness).result()
        return SpareReport(os.getpid(), ray.get_runtime_context().get_node_id())

    def take_seat(self, rank: int, config: WorkerConfig) -> None:
        self._become(rank, config)


def _import_all(niceness: int) -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
    import workers.worker  # noqa: F401
