"""The worker actors of one group as processes: started in their seats, called together, watched and ended.

A rank on the driver's node is watched and killed through its pidfd, which answers within milliseconds and cannot
mean another process; one on another node through Ray. Knows actors and processes; knows no plans and no models.
"""

import logging
import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from cluster.driver.placement import Placement, Seat
from cluster.errors import StartupFailed
from workers.actor import WorkerActor
from workers.config import WorkerConfig
from workers.reports import CodeIdentity, WorkerIdentity

logger = logging.getLogger(__name__)

_KILL_WAIT_S = 1.0  # for Ray to end a process before a SIGKILL of our own
_REAP_WAIT_S = 2.0  # for a killed process to be gone


@dataclass(slots=True)
class Rank:
    """One worker actor. `pidfd` is set for a process of this node, once it has said who it is."""

    seat: Seat
    actor: Any
    identity: WorkerIdentity | None = None
    pidfd: int | None = None

    @property
    def name(self) -> str:
        """For people: which process this is."""
        if self.identity is None:
            return f"rank {self.seat.rank} (node {self.seat.node_id[:8]})"
        return f"rank {self.seat.rank} (pid {self.identity.pid} on {self.identity.node_ip})"


class Ranks:
    """All ranks of a group, in order. `end()` leaves no process of theirs; it is idempotent."""

    def __init__(self, placement: Placement, configs: Sequence[WorkerConfig]) -> None:
        worker_actor: Any = WorkerActor  # what `ray.remote` makes of the class, Ray does not annotate
        self._members: list[Rank] = []
        for seat, config in zip(placement.seats, configs, strict=True):
            options = worker_actor.options(
                num_cpus=1,
                num_gpus=1 if config.device == "cuda" else 0,
                max_restarts=0,  # a lone restarted rank cannot rejoin its group
                scheduling_strategy=placement.strategy(seat),
            )
            self._members.append(Rank(seat, options.remote(seat.rank, config)))

    def __len__(self) -> int:
        return len(self._members)

    def __getitem__(self, rank: int) -> Rank:
        return self._members[rank]

    @property
    def on_one_node(self) -> bool:
        return len({member.seat.node_id for member in self._members}) == 1

    def identify(self, deadline_s: float) -> None:
        """Learn every rank's process, and that it runs our code. Raises `StartupFailed`."""
        mine = CodeIdentity.of_this_process()
        here = ray.get_runtime_context().get_node_id()
        identities = self.call("start", lambda actor: actor.identify.remote(), deadline_s)
        for member, identity in zip(self._members, identities, strict=True):
            member.identity = identity
            if identity.node_id == here:
                with suppress(ProcessLookupError):  # gone already: the next call says so
                    member.pidfd = os.pidfd_open(identity.pid)
            difference = mine.difference(identity.code, same_node=identity.node_id == here)
            if difference is not None:
                raise StartupFailed(f"{member.name} runs other code than the driver: {difference}")

    def call(
        self,
        what: str,
        method: Callable[[Any], Any],
        deadline_s: float,
        on_answer: Callable[[Rank, Any], None] | None = None,
    ) -> list[Any]:
        """Call all ranks at once and collect in rank order; the first that fails fails all.

        Raises `StartupFailed` naming the rank, also when an answer is missing at the deadline.
        """
        deadline = time.monotonic() + deadline_s
        pending = {method(member.actor): member for member in self._members}
        answers: dict[int, Any] = {}
        while pending:
            done, _ = ray.wait(list(pending), num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                missing = ", ".join(member.name for member in pending.values())
                raise StartupFailed(f"{missing} did not {what} within {deadline_s:g} s")
            member = pending.pop(done[0])
            answer = _answer(member, what, done[0])
            answers[member.seat.rank] = answer
            if on_answer is not None:
                on_answer(member, answer)
        return [answers[rank] for rank in range(len(self._members))]

    def first_death(self) -> str | None:
        """The first rank of this node whose process has ended, in words; None while all live."""
        fds = {member.pidfd: member for member in self._members if member.pidfd is not None}
        poll = select.poll()
        for fd in fds:
            poll.register(fd, select.POLLIN)
        return next((f"{fds[fd].name} has ended" for fd, _ in poll.poll(0)), None)

    def end(self) -> None:
        """Kill every process, whatever it is doing; also one that is stopped and does not hear Ray."""
        for member in self._members:
            with suppress(RayError):
                ray.kill(member.actor, no_restart=True)
        if not self._all_gone(_KILL_WAIT_S):
            for member in self._members:
                if member.pidfd is not None:
                    with suppress(ProcessLookupError):
                        signal.pidfd_send_signal(member.pidfd, signal.SIGKILL)
            if not self._all_gone(_REAP_WAIT_S):
                logger.error("some ranks are still alive %g s after SIGKILL", _REAP_WAIT_S)
        for member in self._members:
            if member.pidfd is not None:
                os.close(member.pidfd)
        self._members = []

    def _all_gone(self, within_s: float) -> bool:
        deadline = time.monotonic() + within_s
        for member in self._members:
            if member.pidfd is not None:
                poll = select.poll()
                poll.register(member.pidfd, select.POLLIN)
                if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                    return False
        return True


def _answer(member: Rank, what: str, ref: Any) -> Any:
    try:
        return ray.get(ref, timeout=0)
    except RayTaskError as error:
        raise StartupFailed(f"{member.name} could not {what}: {error.cause}") from error.cause
    except RayActorError as error:
        raise StartupFailed(f"{member.name} died before it could {what}: {error}") from error
    except GetTimeoutError as error:
        raise StartupFailed(f"{member.name}: the answer to {what} is lost") from error
