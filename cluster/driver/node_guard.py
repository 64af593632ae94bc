"""Eyes and hands on a node that has ranks of the group and not its driver: one actor there, without a CPU.

How a process ended, what it said last and the end of one that is stopped are a matter of its own node: Ray tells a
driver elsewhere no signal and no line. A guard is a convenience: without its answer a driver knows what Ray knows.
Knows processes of its node; knows nothing of ranks.
"""

import logging
import os
import select
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from cluster.driver.exits import last_words, oom_kills
from cluster.driver.placement import Placement, Seat

logger = logging.getLogger(__name__)

_ANSWER_S = 2.0  # for a guard on a busy node to answer; a node that is lost has none that could
_SEEN_WITHIN_S = 0.2  # Ray may tell the driver of an end before the kernel tells the guard


@dataclass(frozen=True, slots=True)
class _Watched:
    pidfd: int
    log: str
    oom_kills: int  # when it was first watched


class Guard:
    """What the actor does. A process that has ended is remembered until the next one is watched."""

    def __init__(self) -> None:
        self._watched: dict[int, _Watched] = {}

    def watch(self, pid: int, log: str) -> None:
        """From now on its end can be told. `log` is the file that its stderr goes to."""
        for ended in [pid for pid, watched in self._watched.items() if _ends_within(watched.pidfd, 0)]:
            os.close(self._watched.pop(ended).pidfd)
        if pid not in self._watched:
            with suppress(ProcessLookupError):
                self._watched[pid] = _Watched(os.pidfd_open(pid), log, oom_kills())

    def last_words(self, pid: int) -> str | None:
        """How it ended and its last lines; None of one that lives, or is not watched."""
        watched = self._watched.get(pid)
        if watched is None or not _ends_within(watched.pidfd, _SEEN_WITHIN_S):
            return None
        return last_words(watched.pidfd, pid, watched.log, oom_kills_before=watched.oom_kills)

    def kill(self, pid: int) -> None:
        """Also one that is stopped."""
        watched = self._watched.get(pid)
        if watched is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(watched.pidfd, signal.SIGKILL)


def _ends_within(pidfd: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


@ray.remote
class GuardActor(Guard):
    """One on each such node."""


class NodeGuard:
    """The driver's end of one. `is_lost` once it has not answered: nobody waits for it a second time."""

    def __init__(self, placement: Placement, seat: Seat) -> None:
        actor: Any = GuardActor  # what `ray.remote` makes of the class, Ray does not annotate
        options = actor.options(num_cpus=0, max_restarts=0, scheduling_strategy=placement.strategy(seat))
        self._actor = options.remote()
        self.is_lost = False

    def watch(self, pid: int, log: str) -> None:
        """Does not wait. Calls are carried out in their order."""
        self._actor.watch.remote(pid, log)

    def last_words(self, pid: int) -> str | None:
        """As `Guard` says it; None also without an answer."""
        words: str | None = self._ask(lambda actor: actor.last_words.remote(pid))
        return words

    def kill(self, pid: int) -> None:
        self._ask(lambda actor: actor.kill.remote(pid))

    def end(self) -> None:
        """Leave no process. Idempotent."""
        self.is_lost = True
        with suppress(RayError):
            ray.kill(self._actor)

    def _ask(self, call: Callable[[Any], Any]) -> Any:
        if self.is_lost:
            return None
        try:
            return ray.get(call(self._actor), timeout=_ANSWER_S)
        except RayError as error:
            self.is_lost = True
            logger.warning("the guard of a node does not answer: %s", str(error).partition("\n")[0])
            return None
