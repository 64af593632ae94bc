"""One rank's life: identify, join the group, load, allocate, run, stop.

The order is the driver's to keep; a call out of order is refused. Loading happens once; joining, allocating and
running happen once for each incarnation, so a rank that outlives a peer keeps its weights. Knows the parts of a
rank and their order; knows nothing of Ray.
"""

import logging
import os
import select
import socket
import time
import traceback
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from model_shards.model import ShardedModel
from model_shards.weights.file_sums import differing, file_sums
from model_shards.weights.holdings import holdings_of
from model_shards.weights.loader import load_model
from model_shards.weights.proof import Checksum, Holding
from workers.channel import WorkerChannel, WorkerEndpoint
from workers.config import WorkerConfig
from workers.device import check_gpu, set_threads, torch_dtype
from workers.errors import ChannelError, ChannelInterrupted, ChannelTimeout, WorkerError
from workers.kv_cache import bytes_per_block
from workers.lack_of_memory import memory_for
from workers.memory_profile import profile_memory
from workers.process_group import Rendezvous, TimedGroup, join_group, open_group
from workers.protocol import StepFailure, StepPlan, StopWorkers
from workers.reports import CodeIdentity, LoadReport, WorkerIdentity
from workers.runner import Runner

_log = logging.getLogger(__name__)

_IDLE_WAIT_S = 1.0
_JOIN_S = 60.0  # all ranks are told to come at once: who is not there by then cannot be reached
_FLUSH_S = 1.0  # for a failure report to leave before its socket closes


class Worker:
    """Calls come from one thread, except `identify` and `stop`, which any thread may make at any time."""

    def __init__(self, rank: int, config: WorkerConfig, *, node_id: str = "", node_ip: str = "127.0.0.1") -> None:
        self._rank = rank
        self._config = config
        self._node_id = node_id
        self._node_ip = node_ip
        self._group = TimedGroup()
        self._rendezvous: Rendezvous | None = None
        self._model: ShardedModel | None = None
        self._holdings: tuple[Holding, ...] = ()
        self._runner: Runner | None = None
        self._stop_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def identify(self) -> WorkerIdentity:
        return WorkerIdentity(
            rank=self._rank,
            pid=os.getpid(),
            node_id=self._node_id,
            node_ip=self._node_ip,
            hostname=socket.gethostname(),
            code=CodeIdentity.of_this_process(),
            stderr=_file_behind(2),
        )

    def open_group(self, same_host: bool) -> str:
        """On rank 0: open the meeting point of a new group, and return the address that `join_group` takes."""
        self._close_rendezvous()
        self._rendezvous = open_group(
            self._config.tensor_parallel_size,
            self._config.device,
            same_host=same_host,
            host=self._node_ip,
            deadline_s=self._config.start_deadline_s,
        )
        return self._rendezvous.address

    def join_group(self, address: str) -> str:
        """Meet the peers; a new incarnation begins here, so what stopped the last one is forgotten.

        Returns the transport. Raises `GroupBroken` when a rank does not come, early enough for the driver to hear
        of it before the start deadline.
        """
        self._runner = None
        self._forget_stop()
        check_gpu(self._config.device)
        try:
            group = join_group(
                address,
                self._rank,
                self._config.tensor_parallel_size,
                deadline_s=min(_JOIN_S, self._config.start_deadline_s / 2),
                step_deadline_s=self._config.step_deadline_s,
                rendezvous=self._rendezvous,
            )
        finally:
            self._close_rendezvous()
        self._group.attach(group)
        return group.transport

    def load(self) -> LoadReport:
        """Read this rank's shard. Raises `ModelError` for what is wrong with the files, or `OutOfMemory`."""
        config = self._config
        self._check_joined("load")
        self._set_threads()
        started = time.perf_counter()
        path = Path(config.model_path)
        with memory_for("its shard of the weights", config.device):
            model = load_model(
                path,
                self._group,
                device=torch.device(config.device),
                dtype=torch_dtype(config.dtype),
                batch_invariant=config.batch_invariant,
                shard_weights=config.shard_weights,
            )
            memory = profile_memory(model, config)
        self._model = model
        self._holdings = holdings_of(model, path, self._rank) if config.shard_proof else ()
        return LoadReport(
            rank=self._rank,
            weight_bytes=sum(parameter.local_size(self._rank) for parameter in model.layout.values())
            * torch_dtype(config.dtype).itemsize,
            seconds=time.perf_counter() - started,
            bytes_per_block=bytes_per_block(model, config.block_size, config.dtype),
            free_memory=memory.free,
            total_memory=memory.total,
            activation_memory=memory.activations,
            holdings=self._holdings,
        )

    def file_sums(self) -> dict[str, Checksum]:
        """This rank's share of a second reading of the files, for the shard proof. Raises `ModelError`."""
        self._set_threads()
        config = self._config
        return file_sums(
            Path(config.model_path),
            torch_dtype(config.dtype),
            share=self._rank,
            num_shares=config.tensor_parallel_size,
        )

    def differing(self, tensors: Collection[str]) -> tuple[Holding, ...]:
        """Which parts of these file tensors this rank does not hold as the files have them."""
        config = self._config
        return differing(self._holdings, tensors, Path(config.model_path), torch_dtype(config.dtype))

    def allocate(self, num_blocks: int) -> None:
        """Make the KV cache and an empty mirror; a collective. Raises `OutOfMemory` when the blocks do not fit."""
        self._check_joined("allocate")
        if self._model is None:
            raise WorkerError(f"rank {self._rank}: allocate was called before load")
        self._runner = None  # an earlier cache goes before the new one comes
        with memory_for(f"{num_blocks} KV blocks", self._config.device):
            self._runner = Runner(self._model, self._group, self._config, num_blocks)

    def run(self, endpoint: WorkerEndpoint) -> str:
        """Execute plans until a stop, a failure or the driver's death; returns which.

        A failure has been sent to the driver when this returns, and peers have been told to leave their waits.
        """
        if self._runner is None:
            raise WorkerError(f"rank {self._rank}: run was called before allocate")
        self._set_threads()
        channel = WorkerChannel(endpoint)
        try:
            channel.watch(self._stop_fd, "a stop was asked for")
            with _driver_watched(channel, endpoint):
                return self._execute_plans(channel, self._runner, endpoint.incarnation)
        finally:
            channel.close(_FLUSH_S)

    def stop(self) -> None:
        """End the present incarnation: leave a wait for a plan, or for a peer, at once. Idempotent."""
        os.eventfd_write(self._stop_fd, 1)
        self._group.abort()

    def close(self) -> None:
        """Free everything. Idempotent; `run` must have ended."""
        self._runner = None
        self._model = None
        self._close_rendezvous()
        self._group.close()
        if self._stop_fd >= 0:
            os.close(self._stop_fd)
            self._stop_fd = -1

    def _execute_plans(self, channel: WorkerChannel, runner: Runner, incarnation: int) -> str:
        step = -1
        try:
            while True:
                idle_since = time.perf_counter()
                message = _next_message(channel)
                if isinstance(message, StopWorkers):
                    return "the driver stopped this incarnation"
                wait_s = time.perf_counter() - idle_since
                step = message.step
                result = runner.execute(message)
                if self._rank == 0:
                    channel.send(replace(result, timings=replace(result.timings, wait=wait_s)))
        except ChannelInterrupted as interruption:
            return str(interruption)
        except Exception as error:  # whatever ends a step ends the incarnation, and the driver must hear of it
            return self._report_failure(channel, incarnation, step, error)

    def _report_failure(self, channel: WorkerChannel, incarnation: int, step: int, error: Exception) -> str:
        message = f"{type(error).__name__}: {error}"
        if self._stop_asked():
            return f"a stop was asked for during step {step}: {message}"
        _log.error("rank %d failed in step %d of incarnation %d", self._rank, step, incarnation, exc_info=error)
        try:
            channel.send(StepFailure(incarnation, step, self._rank, message, traceback.format_exc()))
        except ChannelError as unsent:
            _log.error("rank %d could not report its failure: %s", self._rank, unsent)
        self._group.abort()
        return message

    def _set_threads(self) -> None:
        if self._config.device == "cpu":
            set_threads(self._config.num_threads)  # the count belongs to the calling thread

    def _check_joined(self, what: str) -> None:
        size = self._config.tensor_parallel_size
        if self._group.size != size:
            raise WorkerError(f"rank {self._rank}: {what} was called before join_group of {size} ranks")

    def _close_rendezvous(self) -> None:
        if self._rendezvous is not None:
            self._rendezvous.close()
            self._rendezvous = None

    def _stop_asked(self) -> bool:
        return bool(select.select([self._stop_fd], [], [], 0)[0])

    def _forget_stop(self) -> None:
        if self._stop_asked():
            os.eventfd_read(self._stop_fd)


def _file_behind(fd: int) -> str:
    path = os.readlink(f"/proc/self/fd/{fd}")
    return path if os.path.isfile(path) else ""


def _next_message(channel: WorkerChannel) -> StepPlan | StopWorkers:
    """An idle rank waits as long as its driver lives; a stop and the driver's death interrupt it."""
    while True:
        try:
            return channel.receive(_IDLE_WAIT_S)
        except ChannelTimeout:
            continue


@contextmanager
def _driver_watched(channel: WorkerChannel, endpoint: WorkerEndpoint) -> Iterator[None]:
    """Let the driver's death interrupt waits, where its process can be seen from here. Ray sees it elsewhere."""
    if endpoint.driver_pid is None:
        yield
        return
    try:
        fd = os.pidfd_open(endpoint.driver_pid)
    except ProcessLookupError:
        raise ChannelError(f"rank {endpoint.rank}: the driver, process {endpoint.driver_pid}, is gone") from None
    try:
        channel.watch(fd, f"the driver, process {endpoint.driver_pid}, has ended")
        yield
    finally:
        os.close(fd)
