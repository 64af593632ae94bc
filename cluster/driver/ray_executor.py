"""A worker group across the cluster: actors in a placement group, a step channel to them, and an eye on each.

Starting is a fixed order, place, spawn, identify, join, load, size, allocate, connect, run; what it took is freed
again if any of it fails. Knows Ray's actors and the step channel; carries plans and results without looking inside
and loads no torch.
"""

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.config import ClusterConfig
from cluster.driver.driver import StartedGroup
from cluster.driver.placement import Placement, Seat, bundles_for, resolve_device
from cluster.driver.ranks import Rank, Ranks
from cluster.driver.resolution import ModelFiles, fit, worker_config
from cluster.driver.sizing import RankMemory
from cluster.engine.executor import Capacity, ExecutorFailed
from cluster.errors import StartupFailed
from model_shards.errors import ModelError
from model_shards.sources import resolve_model
from workers.channel import DriverChannel
from workers.config import WorkerConfig
from workers.device import threads_per_rank
from workers.errors import WorkerError
from workers.protocol import StepFailure, StepPlan, StepResult, StopWorkers
from workers.reports import LoadReport

logger = logging.getLogger(__name__)

_STOP_WAIT_S = 2.0  # for ranks to leave their loops before they are killed
_WATCH_S = 0.5


class RayExecutor:
    """One incarnation of a group whose ranks are ready to run. Owns ranks, placement and channel.

    `submit`, `take_result` and `stop` belong to one thread; `failure` may be asked from any.
    """

    def __init__(self, ranks: Ranks, placement: Placement, capacity: Capacity, incarnation: int = 0) -> None:
        self.capacity = capacity
        self.incarnation = incarnation
        self._ranks = ranks
        self._placement = placement
        self._failure: str | None = None
        self._stopping = threading.Event()
        host = None if ranks.on_one_node else ray.util.get_node_ip_address()
        self._channel = DriverChannel(len(ranks), incarnation, host=host)
        self._death_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._channel.watch(self._death_fd, "a rank has ended")
        self._running: dict[Any, Rank] = {}
        for rank, endpoint in enumerate(self._channel.endpoints):
            member = ranks[rank]
            self._running[member.actor.run.remote(endpoint)] = member
            if member.pidfd is not None:
                self._channel.watch(member.pidfd, f"{member.name} has ended")
        self._watcher = threading.Thread(target=self._watch, name="rank-watch", daemon=True)
        self._watcher.start()

    def failure(self) -> str | None:
        """Why the group cannot go on, as soon as it is known; None while it can."""
        if self._failure is None and not self._stopping.is_set():
            self._failure = self._ranks.first_death()
        return self._failure

    def submit(self, plan: StepPlan) -> None:
        try:
            self._channel.send(plan)
        except WorkerError as error:
            raise self._failed(str(error)) from error

    def take_result(self, timeout_s: float) -> StepResult:
        try:
            message = self._channel.receive(timeout_s)
        except WorkerError as error:
            raise self._failed(self._failure or str(error)) from error
        if isinstance(message, StepFailure):
            logger.error("rank %d failed in step %d:\n%s", message.rank, message.step, message.traceback)
            raise self._failed(f"rank {message.rank} failed in step {message.step}: {message.message}")
        return message

    def stop(self) -> None:
        if self._stopping.is_set():
            return
        self._stopping.set()
        try:
            if self._failure is None:
                self._leave_loops()
        finally:
            self._watcher.join(2 * _WATCH_S)
            self._channel.close()
            os.close(self._death_fd)
            self._ranks.end()
            self._placement.release()

    def _leave_loops(self) -> None:
        try:
            self._channel.send(StopWorkers(self.incarnation))
            ray.wait(list(self._running), num_returns=len(self._running), timeout=_STOP_WAIT_S)
        except (WorkerError, RayError) as error:
            logger.warning("the ranks did not take the stop and are killed: %s", error)

    def _failed(self, message: str) -> ExecutorFailed:
        self._failure = self._failure or message
        return ExecutorFailed(self._failure)

    def _watch(self) -> None:
        """The end of a `run()` call is how a death on another node is heard of."""
        while not self._stopping.is_set():
            ended, _ = ray.wait(list(self._running), num_returns=1, timeout=_WATCH_S)
            if ended and not self._stopping.is_set():
                self._failure = self._failure or f"{self._running[ended[0]].name} {_ending(ended[0])}"
                os.eventfd_write(self._death_fd, 1)
                return


def start_ray_group(config: ClusterConfig) -> StartedGroup:
    """Place, start and load the ranks. Raises `InvalidConfig` or `StartupFailed`, and then leaves nothing."""
    try:
        with ExitStack() as taken:
            started = _start(config, taken)
            taken.pop_all()  # the executor owns it all from here
            return started
    except (ModelError, WorkerError) as error:
        raise StartupFailed(str(error)) from error


def _start(config: ClusterConfig, taken: ExitStack) -> StartedGroup:
    clock = _Stopwatch(config.start_deadline_s)
    device = resolve_device(config.device)
    files = ModelFiles.of(config.model)
    placement = Placement.current_or_new(bundles_for(config.tensor_parallel_size, device), clock.left())
    taken.callback(placement.release)
    worker = worker_config(config, files, device, num_threads=1)
    ranks = Ranks(placement, _config_by_seat(config, worker, placement.seats))
    taken.callback(ranks.end)
    ranks.identify(clock.left())
    logger.info("%d ranks started after %.1f s: %s", len(ranks), clock.spent(), _names(ranks))
    _join(ranks, clock)
    reports: list[LoadReport] = ranks.call("load", lambda actor: actor.load.remote(), clock.left(), _log_loaded)
    memory = [
        RankMemory(seat.node_id, report.free_memory, report.bytes_per_block)
        for seat, report in zip(placement.seats, reports, strict=True)
    ]
    num_blocks, model = fit(config, files, worker, memory)
    ranks.call("allocate", lambda actor: actor.allocate.remote(num_blocks), clock.left())
    executor = RayExecutor(ranks, placement, Capacity(num_blocks, config.block_size))
    logger.info("the worker group is ready after %.1f s", clock.spent())
    return StartedGroup(executor, model, executor.failure)


def _join(ranks: Ranks, clock: "_Stopwatch") -> None:
    """A new group for one incarnation: rank 0 opens the meeting point, everybody comes."""
    try:
        address = ray.get(ranks[0].actor.open_group.remote(ranks.on_one_node), timeout=clock.left())
    except RayTaskError as error:
        raise StartupFailed(f"{ranks[0].name} could not open the group: {error.cause}") from error.cause
    except RayError as error:
        raise StartupFailed(f"{ranks[0].name} could not open the group: {error}") from error
    transports = ranks.call("join the group", lambda actor: actor.join_group.remote(address), clock.left())
    logger.info("the ranks have met over %s after %.1f s", transports[0], clock.spent())


def _config_by_seat(config: ClusterConfig, worker: WorkerConfig, seats: Sequence[Seat]) -> list[WorkerConfig]:
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


def _log_loaded(rank: Rank, report: LoadReport) -> None:
    logger.info("%s loaded %.1f MiB in %.1f s", rank.name, report.weight_bytes / 2**20, report.seconds)


def _names(ranks: Ranks) -> str:
    return ", ".join(ranks[rank].name for rank in range(len(ranks)))


def _ending(run: Any) -> str:
    """How a `run()` call ended, in words."""
    try:
        return f"left its loop: {ray.get(run, timeout=0)}"
    except RayTaskError as error:
        return f"left its loop: {error.cause}"
    except RayActorError:
        return "has ended"
    except RayError as error:
        return f"is lost: {error}"


class _Stopwatch:
    """One deadline over all parts of a start."""

    def __init__(self, deadline_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started = clock()
        self._deadline_s = deadline_s

    def spent(self) -> float:
        return self._clock() - self._started

    def left(self) -> float:
        return max(0.0, self._deadline_s - self.spent())
