"""What each rank is started with: equal but for what differs between the nodes they sit on.

Knows nodes, paths and cores; knows nothing of actors' lives or steps.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.config import ClusterConfig
from cluster.driver.placement import Seat
from cluster.errors import StartupFailed
from model_shards.sources import resolve_model
from workers.config import WorkerConfig
from workers.device import threads_per_rank


def config_by_seat(config: ClusterConfig, worker: WorkerConfig, seats: Sequence[Seat]) -> list[WorkerConfig]:
    """Equal but for what differs between nodes: where the model's files are, and how many cores a rank gets."""
    here = ray.get_runtime_context().get_node_id()
    crowd = Counter(seat.node_id for seat in seats)
    by_node: dict[str, WorkerConfig] = {}
    for node_id, ranks in crowd.items():
        if node_id == here:
            by_node[node_id] = replace(worker, num_threads=threads_per_rank(ranks))
        else:
            path = _resolve_elsewhere(config.model, node_id, config.start_deadline_s)
            threads = threads_per_rank(ranks, cpus=_cpus_of(node_id))
            by_node[node_id] = replace(worker, model_path=path, num_threads=threads)
    return [by_node[seat.node_id] for seat in seats]


def _resolve_elsewhere(model: str, node_id: str, deadline_s: float) -> str:
    """The model's path on another node, fetched there if need be."""
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task = ray.remote(_resolved_path).options(num_cpus=0, scheduling_strategy=strategy)
    try:
        path: str = ray.get(task.remote(model), timeout=deadline_s)
    except RayTaskError as error:
        raise StartupFailed(f"model {model!r} on node {node_id[:8]}: {error.cause}") from error.cause
    except RayError as error:
        raise StartupFailed(f"model {model!r} on node {node_id[:8]}: {error}") from error
    return path


def _resolved_path(model: str) -> str:
    return str(resolve_model(model))


def _cpus_of(node_id: str) -> int:
    totals = {node["NodeID"]: node["Resources"].get("CPU", 1) for node in ray.nodes()}
    return max(1, int(totals.get(node_id, 1)))
