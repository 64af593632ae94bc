"""A worker group across the cluster: actors in a placement group, a step channel to them, and an eye on each.

Starting is a fixed order, place, spawn, identify, join, load, size, allocate, connect, run; what it took is freed
again if any of it fails. Restarting is the same without placing and sizing, and survivors need not load. Knows
Ray's actors and the step channel; carries plans and results without looking inside and loads no torch.
"""

import logging
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial

import ray
from ray.exceptions import RayError

from cluster.config import ClusterConfig
from cluster.driver.death_watch import DeathWatch
from cluster.driver.driver import StartedGroup
from cluster.driver.patience import Patience
from cluster.driver.placement import Placement, bundles_for, offered_gpus
from cluster.driver.proving import ShardProof
from cluster.driver.rank import Rank
from cluster.driver.ranks import Ranks
from cluster.driver.ray_spare import RaySpare
from cluster.driver.resolution import ModelFiles, check_model, fit, keeps_spares, resolve_device, worker_config
from cluster.driver.seating import config_by_seat
from cluster.driver.sizing import RankMemory
from cluster.driver.spares import Spares
from cluster.engine.executor import Capacity, ExecutorFailed
from cluster.errors import StartupFailed
from model_shards.errors import ModelError
from workers.channel import DriverChannel
from workers.errors import ChannelTimeout, WorkerError
from workers.protocol import StepFailure, StepPlan, StepResult, StopWorkers
from workers.reports import LoadReport

logger = logging.getLogger(__name__)

_STOP_WAIT_S = 2.0  # for ranks to leave their loops before they are killed
_LAST_WORD_S = 0.5  # for a rank to say which other it waits for, once a step is late
_NEAR_DEATH_S = 0.05  # for a death to be heard of that may explain a failure
_FAR_DEATH_S = 0.5  # the same, of a rank on another node


class RayExecutor:
    """Ranks that are ready to run, one incarnation after the other. Owns ranks, spares, placement and channel.

    `failure` may be asked from any thread; everything else belongs to one thread at a time.
    """

    def __init__(
        self,
        ranks: Ranks,
        spares: Spares,
        placement: Placement,
        capacity: Capacity,
        *,
        proof: ShardProof | None,
        restart_deadline_s: float,
        keep_survivors: bool,
    ) -> None:
        self.capacity = capacity
        self.incarnation = 0
        self._ranks = ranks
        self._spares = spares
        self._placement = placement
        self._proof = proof
        self._restart_deadline_s = restart_deadline_s
        self._keep_survivors = keep_survivors
        self._last_restart_failed = False
        self._failure: str | None = None
        self._stopped = False
        self._serves = False  # this incarnation has run a step
        self._connect()

    def failure(self) -> str | None:
        """Why this incarnation cannot go on, as soon as it is known; None while it can."""
        return self._failure or self._watch.cause

    def submit(self, plan: StepPlan) -> None:
        try:
            self._channel.send(plan)
        except WorkerError as error:
            raise self._failed(str(error)) from error

    def take_result(self, timeout_s: float) -> StepResult:
        try:
            message = self._receive(timeout_s)
        except WorkerError as error:
            raise self._failed(str(error)) from error
        if isinstance(message, StepFailure):
            logger.error("rank %d failed in step %d:\n%s", message.rank, message.step, message.traceback)
            raise self._failed(f"rank {message.rank} failed in step {message.step}: {message.message}")
        if not self._serves:
            self._serves = True
            self._spares.resume()
        return message

    def restart(self, cancelled: threading.Event) -> Mapping[str, float]:
        """Ranks that outlive a peer keep their process and their weights. Nobody is trusted when it is not clear
        whose fault the end of an incarnation was, nor after a restart that failed.
        """
        patience = Patience(self._restart_deadline_s, cancelled)
        self._spares.pause()
        missing = self._not_to_be_kept()
        self._disconnect()  # not before the others have left: until then they may report what they suffer
        patience.note("stop")
        self._last_restart_failed = True
        try:
            self._bring_back(missing, patience)
        except (StartupFailed, WorkerError) as error:
            raise ExecutorFailed(str(error)) from error
        self._last_restart_failed = False
        return patience.parts

    def _not_to_be_kept(self) -> set[int]:
        """Those who died, and those who hang: whoever does not leave its loop when told. Else everybody."""
        everybody = set(range(len(self._ranks)))
        if not self._keep_survivors or self._last_restart_failed:
            return everybody
        dead = self._ranks.dead()
        guilty = everybody - self._ranks.left_by(everybody - dead)
        return guilty or everybody

    def stop(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        try:
            if self.failure() is None:
                self._leave_loops()
        finally:
            self._disconnect()
            self._spares.end()
            self._ranks.end()
            self._placement.release()

    def _connect(self) -> None:
        host = None if self._ranks.on_this_node else ray.util.get_node_ip_address()
        self._channel = DriverChannel(len(self._ranks), self.incarnation, host=host)
        self._ranks.run(self._channel.endpoints)
        self._watch = DeathWatch(self._ranks.members)
        self._channel.watch(self._watch.fd, "a rank has ended")
        self._failure = None
        self._serves = False

    def _disconnect(self) -> None:
        self._channel.close()
        self._watch.close()

    def _bring_back(self, missing: set[int], patience: Patience) -> None:
        num_spares = self._ranks.replace(missing, self._spares.take)
        patience.note("replace")
        import_s = self._ranks.identify(patience, missing)
        patience.note("spawn", **{"import": import_s})
        self._ranks.join(patience)
        patience.note("group")
        reports = self._ranks.call("load", lambda actor: actor.load.remote(), patience, missing)
        patience.note("load")
        if self._proof is not None:
            self._proof.check(reports, self._ranks, patience)
            patience.note("prove")
        num_blocks = self.capacity.num_blocks
        self._ranks.call("allocate", lambda actor: actor.allocate.remote(num_blocks), patience)
        patience.note("allocate")
        self.incarnation += 1
        self._connect()
        patience.note("connect")
        logger.info(
            "incarnation %d: %d of %d ranks are new, %d of them were spares",
            self.incarnation,
            len(missing),
            len(self._ranks),
            num_spares,
        )

    def _receive(self, timeout_s: float) -> StepResult | StepFailure:
        try:
            return self._channel.receive(timeout_s)
        except ChannelTimeout:
            return self._channel.receive(_LAST_WORD_S)

    def _leave_loops(self) -> None:
        try:
            self._channel.send(StopWorkers(self.incarnation))
            ray.wait(self._ranks.running, num_returns=len(self._ranks), timeout=_STOP_WAIT_S)
        except (WorkerError, RayError) as error:
            logger.warning("the ranks did not take the stop and are killed: %s", error)

    def _failed(self, message: str) -> ExecutorFailed:
        """A death explains more than what its peers suffer from it."""
        patience_s = _NEAR_DEATH_S if self._ranks.on_this_node else _FAR_DEATH_S
        self._failure = self._watch.cause_within(patience_s) or message
        return ExecutorFailed(self._failure)


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
    patience = Patience(config.start_deadline_s)
    device = resolve_device(config.device, ranks=config.tensor_parallel_size, count_gpus=offered_gpus)
    with_spares = keeps_spares(config, device)
    files = ModelFiles.of(config.model)
    check_model(config, files.spec)
    placement = Placement.current_or_new(bundles_for(config.tensor_parallel_size, device), patience.left())
    taken.callback(placement.release)
    worker = worker_config(config, files, device, num_threads=1)
    ranks = Ranks(placement, config_by_seat(config, worker, placement.seats))
    taken.callback(ranks.end)
    ranks.identify(patience)
    logger.info("started after %.1f s: %s", patience.spent(), _names(ranks))
    transport = ranks.join(patience)
    if len(ranks) > 1:
        logger.info("the %d ranks have met over %s after %.1f s", len(ranks), transport, patience.spent())
    reports: list[LoadReport] = ranks.call(
        "load", lambda actor: actor.load.remote(), patience, on_answer=_log_loaded
    )
    proof = _prove(ranks, reports, patience) if config.shard_proof else None
    memory = [
        RankMemory(
            seat.node_id,
            report.free_memory,
            report.bytes_per_block,
            report.total_memory,
            report.activation_memory,
        )
        for seat, report in zip(placement.seats, reports, strict=True)
    ]
    num_blocks, model = fit(config, files, worker, memory)
    ranks.call("allocate", lambda actor: actor.allocate.remote(num_blocks), patience)
    spares = Spares(placement.seats if with_spares else (), partial(RaySpare, placement))
    executor = RayExecutor(
        ranks,
        spares,
        placement,
        Capacity(num_blocks, config.block_size),
        proof=proof,
        restart_deadline_s=config.start_deadline_s,
        keep_survivors=device == "cpu",  # NCCL and captured graphs do not outlive a peer
    )
    logger.info("the worker group is ready after %.1f s", patience.spent())
    return StartedGroup(executor, model, executor.failure)


def _prove(ranks: Ranks, reports: list[LoadReport], patience: Patience) -> ShardProof:
    since = patience.spent()
    proof = ShardProof.of_files(ranks, patience)
    proof.check(reports, ranks, patience)
    logger.info("the weights in memory add up to the files, read again in %.1f s", patience.spent() - since)
    return proof


def _log_loaded(rank: Rank, report: LoadReport) -> None:
    logger.info("%s loaded %.1f MiB in %.1f s", rank.name, report.weight_bytes / 2**20, report.seconds)


def _names(ranks: Ranks) -> str:
    return ", ".join(member.name for member in ranks.members)
