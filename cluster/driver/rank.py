"""One rank as an actor and a process: its name for people, whether it has died, and how.

Knows actors and processes; knows no plans and no models.
"""

import re
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayActorError, RayError, RayTaskError

from cluster.driver.actor_process import ActorProcess
from cluster.driver.placement import Seat
from cluster.errors import StartupFailed
from model_shards.errors import ModelError
from workers.errors import WorkerError
from workers.reports import WorkerIdentity

# Before it guesses at causes.
_RAY_SAYS = re.compile(r"Worker exit detail: (.*?)\.?(?: There are some| Some common causes|$)", re.MULTILINE)


@dataclass(slots=True)
class Rank:
    """One worker actor in its seat. `identity` is set once it has said who it is."""

    seat: Seat
    process: ActorProcess
    identity: WorkerIdentity | None = None
    running: Any = None  # the ref of its `run()` call

    @property
    def name(self) -> str:
        """For people: which process this is."""
        if self.identity is None:
            return f"rank {self.seat.rank} (node {self.seat.node_id[:8]})"
        return f"rank {self.seat.rank} (pid {self.identity.pid} on {self.identity.node_ip})"

    @property
    def node_id(self) -> str:
        return self.seat.node_id if self.identity is None else self.identity.node_id

    def has_died(self) -> bool:
        """Whether its process is known to have ended."""
        if self.process.pidfd is not None:
            return self.process.has_ended()
        if not self.has_left():
            return False
        try:
            ray.get(self.running, timeout=0)
        except RayTaskError:
            return False
        except RayError:
            return True
        return False

    def has_left(self) -> bool:
        """Whether its `run()` call has ended, in whatever way."""
        return self.running is not None and bool(ray.wait([self.running], timeout=0)[0])

    def end_in_words(self) -> str | None:
        """How it ended, or left its loop; None while it runs."""
        if self.process.has_ended():
            return f"{self.name} {self.process.last_words() or 'has ended'}"
        if not self.has_left():
            return None
        try:
            return f"{self.name} left its loop: {ray.get(self.running, timeout=0)}"
        except RayTaskError as error:
            return f"{self.name} left its loop: {_in_words(error.cause)}"
        except RayError as error:
            return self._death(error)

    def answer(self, what: str, ref: Any) -> Any:
        """Of a call that has been answered. Raises `StartupFailed` for any answer but what was asked for."""
        try:
            return ray.get(ref, timeout=0)
        except RayTaskError as error:
            raise StartupFailed(f"{self.name} could not {what}: {_in_words(error.cause)}") from error.cause
        except GetTimeoutError as error:
            raise StartupFailed(f"{self.name}: the answer to {what} is lost") from error
        except RayError as error:
            raise StartupFailed(f"{self._death(error)}; that was before it could {what}") from error

    def _death(self, error: RayError) -> str:
        """What Ray says of an end that it tells of, and what the node's own eyes have seen."""
        if isinstance(error, OutOfMemoryError):
            return (
                f"{self.name} was ended by Ray, whose limit of memory the node has reached: {_first_line(error)}"
            )
        if isinstance(error, RayActorError) and error.actor_init_failed:
            return f"{self.name} failed to start: {str(error).strip().splitlines()[-1]}"
        words = self.process.last_words()
        if words is not None:
            return f"{self.name} {words}"
        detail = _RAY_SAYS.search(str(error))
        return f"{self.name} has ended: {detail[1] if detail is not None else _first_line(error)}"


def _in_words(error: BaseException) -> str:
    """Of what a rank has raised: our own errors speak for themselves, of others the kind is half the message."""
    if isinstance(error, (WorkerError, ModelError)):
        return str(error)
    return f"{type(error).__name__}: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
