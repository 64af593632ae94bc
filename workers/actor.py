"""The Ray actor around a `Worker`: placement and life only, it carries no step.

Control calls have a concurrency group of their own, so they answer while `run` runs; the ref of `run` is how a
driver on another node hears that this process has ended. A driver imports this module for the class alone, so
torch is loaded when an actor starts and not before.
"""

import logging

import ray
import ray.util

from workers.channel import WorkerEndpoint
from workers.config import WorkerConfig
from workers.reports import LoadReport, WorkerIdentity


@ray.remote(concurrency_groups={"control": 2})  # type: ignore[call-overload]  # the stubs do not know the option
class WorkerActor:
    """See `Worker`, whose methods these are."""

    def __init__(self, rank: int, config: WorkerConfig) -> None:
        from workers.worker import Worker

        logging.basicConfig(level=logging.INFO, format=f"[rank {rank}] %(levelname)s %(name)s: %(message)s")
        self._worker = Worker(
            rank,
            config,
            node_id=ray.get_runtime_context().get_node_id(),
            node_ip=ray.util.get_node_ip_address(),
        )

    @ray.method(concurrency_group="control")
    def identify(self) -> WorkerIdentity:
        return self._worker.identify()

    def open_group(self, same_host: bool) -> str:
        return self._worker.open_group(same_host)

    def join_group(self, address: str) -> str:
        return self._worker.join_group(address)

    def load(self) -> LoadReport:
        return self._worker.load()

    def allocate(self, num_blocks: int) -> None:
        self._worker.allocate(num_blocks)

    def run(self, endpoint: WorkerEndpoint) -> str:
        return self._worker.run(endpoint)

    @ray.method(concurrency_group="control")
    def stop(self) -> None:
        self._worker.stop()
