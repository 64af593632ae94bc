"""Processes that wait for the seat of a rank, one on each node of a group, so that its death costs no start.

Most of a rank's start is importing torch, and a spare has done that. It is no rank: its death fails nothing, and
another is started after a pause. Spares are started only while the group serves, when nobody waits for the CPU
they take. Knows nodes, seats and time; `ray_spare` knows the processes.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from ray.exceptions import RayError

from cluster.driver.actor_process import ActorProcess
from cluster.driver.placement import Seat
from workers.config import WorkerConfig

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 2.0  # after the first step of an incarnation: replays and first requests come first
_LONGEST_PAUSE_S = 300.0
_LOOK_S = 1.0
_CLOSE_S = 5.0


class SpareState(Enum):
    STARTING = auto()
    READY = auto()
    LOST = auto()  # it has ended, or cannot be used


class Spare(Protocol):
    """One process. `state` never waits, the others a moment."""

    @property
    def name(self) -> str: ...

    def state(self) -> SpareState:
        """As it is now."""
        ...

    def take(self, seat: Seat, config: WorkerConfig) -> ActorProcess | None:
        """Let it become the rank of `seat`; None when it does not answer, and then it has been ended."""
        ...

    def end(self) -> None:
        """Leave no process."""
        ...


@dataclass(slots=True)
class _Place:
    """One node's. Each spare that is lost unused doubles the pause before the next."""

    seat: Seat  # in whose bundle the spare sits
    spare: Spare | None = None
    due: float = 0.0  # when the next is started
    pause_s: float = _FIRST_PAUSE_S


class Spares:
    """At most one a node, from the first `resume` on. Any thread may call; `end()` is final and idempotent."""

    def __init__(
        self,
        seats: Sequence[Seat],
        start: Callable[[Seat], Spare],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """A spare for each node of `seats`: none without seats."""
        self._start = start
        self._clock = clock
        self._places = {seat.node_id: _Place(seat) for seat in reversed(seats)}
        self._serving = False
        self._lock = threading.Lock()  # guards all of this
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="spares", daemon=True)

    def resume(self) -> None:
        """The group serves: from a little later on spares may be started."""
        with self._lock:
            if self._ended.is_set() or not self._places:
                return
            self._serving = True
            for place in self._places.values():
                place.due = self._clock() + place.pause_s
            if self._thread.ident is None:
                self._thread.start()

    def pause(self) -> None:
        """The group does not serve: start none."""
        with self._lock:
            self._serving = False

    def take(self, seat: Seat, config: WorkerConfig) -> ActorProcess | None:
        """A process of the node of `seat` that has become its rank; None when there is none ready."""
        with self._lock:
            place = self._places.get(seat.node_id)
            if place is None or place.spare is None or place.spare.state() is not SpareState.READY:
                return None
            spare, place.spare = place.spare, None
        process = spare.take(seat, config)
        with self._lock:
            if process is None:
                self._note_loss(place, spare)
            else:
                place.pause_s = _FIRST_PAUSE_S
        return process

    def look(self) -> None:
        """See what has become of each, and start what is due. One thread at a time."""
        lost: list[Spare] = []
        due: list[_Place] = []
        with self._lock:
            for place in self._places.values():
                if place.spare is not None and place.spare.state() is SpareState.LOST:
                    lost.append(place.spare)
                    self._note_loss(place, place.spare)
                    place.spare = None
                elif place.spare is None and self._serving and self._clock() >= place.due:
                    due.append(place)
        for spare in lost:
            spare.end()
        for place in due:
            spare = self._start(place.seat)
            with self._lock:
                if not self._ended.is_set():
                    place.spare = spare
                    continue
            spare.end()

    def end(self) -> None:
        self._ended.set()
        with self._lock:
            self._serving = False
            left = [place.spare for place in self._places.values() if place.spare is not None]
            for place in self._places.values():
                place.spare = None
        for spare in left:
            spare.end()
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_S)

    def _keep(self) -> None:
        while not self._ended.wait(_LOOK_S):
            try:
                self.look()
            except RayError:  # no cluster to ask: the group has other worries
                logger.exception("looking after the spares failed")

    def _note_loss(self, place: _Place, spare: Spare) -> None:
        logger.warning("%s is lost; another comes after %g s", spare.name, place.pause_s)
        place.due = self._clock() + place.pause_s
        place.pause_s = min(_LONGEST_PAUSE_S, 2 * place.pause_s)
