"""A spare as a Ray actor: in a bundle of its group, without a CPU or a GPU of its own.

Ray lets an actor that asks for nothing into any bundle, beside the rank that holds its CPU. Knows actors; knows
nothing of when spares are wanted.
"""

import logging
from typing import Any

import ray
from ray.exceptions import RayError

from cluster.driver.actor_process import ActorProcess, end_all
from cluster.driver.placement import Placement, Seat
from cluster.driver.spares import SpareState
from workers.actor import SpareActor
from workers.config import WorkerConfig
from workers.reports import SpareReport

logger = logging.getLogger(__name__)

_NICENESS = 10  # while it imports: a tenth of a CPU that others want, all of one that nobody wants
_TAKE_S = 2.0  # for a spare to become a rank; a start takes longer


class RaySpare:
    """See `Spare`. One on the driver's node is watched through its pidfd, one elsewhere is asked."""

    def __init__(self, placement: Placement, seat: Seat) -> None:
        spare_actor: Any = SpareActor  # what `ray.remote` makes of the class, Ray does not annotate
        options = spare_actor.options(
            num_cpus=0, num_gpus=0, max_restarts=0, scheduling_strategy=placement.strategy(seat)
        )
        self.name = f"the spare on node {seat.node_id[:8]}"
        self._process = ActorProcess(options.remote())
        self._answer = self._ask()
        self._state = SpareState.STARTING

    def state(self) -> SpareState:
        if self._process.has_ended():
            self._state = SpareState.LOST
        elif self._process.pidfd is None and ray.wait([self._answer], timeout=0)[0]:
            self._note_answer()
        return self._state

    def take(self, seat: Seat, config: WorkerConfig) -> ActorProcess | None:
        try:
            ray.get(self._process.actor.take_seat.remote(seat.rank, config), timeout=_TAKE_S)
        except RayError as error:
            logger.warning("%s: %s", self.name, error)
            self.end()
            return None
        return self._process

    def end(self) -> None:
        end_all([self._process])

    def _ask(self) -> Any:
        return self._process.actor.prepare.remote(_NICENESS)

    def _note_answer(self) -> None:
        try:
            report: SpareReport = ray.get(self._answer, timeout=0)
        except RayError as error:
            logger.warning("%s: %s", self.name, error)
            self._state = SpareState.LOST
            return
        if self._state is SpareState.STARTING:
            logger.info("%s is ready: pid %d", self.name, report.pid)
        self._state = SpareState.READY
        if report.node_id == ray.get_runtime_context().get_node_id():
            self._process.watch(report.pid)
        else:
            self._answer = self._ask()
