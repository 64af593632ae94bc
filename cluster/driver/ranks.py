"""The worker actors of one group as processes: started in their seats, called together, replaced and ended.

Knows actors and processes; knows no plans and no models.
"""

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from cluster.driver.actor_process import ActorProcess, end_all
from cluster.driver.exits import how_it_ended, last_lines
from cluster.driver.patience import Patience
from cluster.driver.placement import Placement, Seat
from cluster.errors import StartupFailed
from workers.actor import WorkerActor
from workers.channel import WorkerEndpoint
from workers.config import WorkerConfig
from workers.reports import CodeIdentity, WorkerIdentity

SeatTaker = Callable[[Seat, WorkerConfig], ActorProcess | None]

_LEAVE_WAIT_S = 2.0  # for a rank to leave its loop once it is told
_LOOK_S = 0.1  # between looks at who has died, while answers are awaited
_LAST_LINES = 5
_RAY_SAYS = re.compile(r"Worker exit detail: (.*?)(?: There are some|$)", re.MULTILINE)  # of one on another node
_GRACE_S = 1.0  # for Ray to end ranks that nobody waits for
_RUN = "WorkerActor.run"  # what `ps` shows of a rank, also of one that was a spare


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
        except RayActorError:
            return True
        except RayError:
            pass
        return False

    def has_left(self) -> bool:
        """Whether its `run()` call has ended, in whatever way."""
        return self.running is not None and bool(ray.wait([self.running], timeout=0)[0])

    def end_in_words(self) -> str | None:
        """How it ended, or left its loop; None while it runs."""
        if self.process.has_ended():
            return f"{self.name} {self._death()}"
        if not self.has_left():
            return None
        try:
            return f"{self.name} left its loop: {ray.get(self.running, timeout=0)}"
        except RayTaskError as error:
            return f"{self.name} left its loop: {error.cause}"
        except RayActorError as error:
            detail = _RAY_SAYS.search(str(error))
            return f"{self.name} has ended" + (f": {detail[1]}" if detail is not None else "")
        except RayError as error:
            return f"{self.name} is lost: {error}"

    def _death(self) -> str:
        if self.identity is None or self.process.pidfd is None:
            return "has ended"
        lines = last_lines(self.identity.stderr, _LAST_LINES)
        said = "; its last lines: " + " | ".join(lines) if lines else ""
        return how_it_ended(self.process.pidfd, self.identity.pid) + said


class Ranks:
    """All ranks of a group, in order. `end()` leaves no process of theirs; it is idempotent."""

    def __init__(self, placement: Placement, configs: Sequence[WorkerConfig]) -> None:
        self._placement = placement
        self._configs = tuple(configs)
        self._here = ray.get_runtime_context().get_node_id()
        self._members = [self._spawn(seat) for seat in placement.seats]

    def __len__(self) -> int:
        return len(self._members)

    @property
    def members(self) -> tuple[Rank, ...]:
        """As they are now: later ones may take their seats."""
        return tuple(self._members)

    @property
    def running(self) -> list[Any]:
        """The refs of the ranks' `run()` calls."""
        return [member.running for member in self._members]

    @property
    def on_one_node(self) -> bool:
        return len({member.node_id for member in self._members}) == 1

    @property
    def on_this_node(self) -> bool:
        """Whether all are on the driver's own."""
        return all(member.node_id == self._here for member in self._members)

    def name_of(self, rank: int) -> str:
        """For people: which process `rank` is."""
        return self._members[rank].name

    def identify(self, patience: Patience, which: Collection[int] | None = None) -> float:
        """Learn each rank's process, and that it runs our code. Raises `StartupFailed`.

        Returns how many seconds importing took of it.
        """
        mine = CodeIdentity.of_this_process()
        identities: list[WorkerIdentity] = self.call(
            "start", lambda actor: actor.identify.remote(), patience, which
        )
        for identity in identities:
            member = self._members[identity.rank]
            member.identity = identity
            if identity.node_id == self._here:
                member.process.watch(identity.pid)
            difference = mine.difference(identity.code, same_node=identity.node_id == self._here)
            if difference is not None:
                raise StartupFailed(f"{member.name} runs other code than the driver: {difference}")
        return max(identity.import_seconds for identity in identities)

    def join(self, patience: Patience) -> str:
        """A new group for one incarnation: rank 0 opens the meeting point, everybody comes. Returns what it is."""
        same_host = self.on_one_node
        (address,) = self.call("open the group", lambda actor: actor.open_group.remote(same_host), patience, {0})
        transports = self.call("join the group", lambda actor: actor.join_group.remote(address), patience)
        return str(transports[0])

    def call(
        self,
        what: str,
        method: Callable[[Any], Any],
        patience: Patience,
        which: Collection[int] | None = None,
        on_answer: Callable[[Rank, Any], None] | None = None,
    ) -> list[Any]:
        """Call all ranks at once, or those named, and collect in rank order; the first that fails fails all.

        Raises `StartupFailed` naming the rank, also when any rank dies meanwhile or an answer is missing at the
        end of `patience`.
        """
        called = [member for member in self._members if which is None or member.seat.rank in which]
        pending = {method(member.process.actor): member for member in called}
        answers: dict[int, Any] = {}
        while pending:
            left_s = patience.left()
            done, _ = ray.wait(list(pending), num_returns=1, timeout=min(left_s, _LOOK_S))
            if done:
                member = pending.pop(done[0])
                answers[member.seat.rank] = answer = _answer(member, what, done[0])
                if on_answer is not None:
                    on_answer(member, answer)
            elif (cause := self.first_death()) is not None:
                raise StartupFailed(cause)
            elif left_s == 0:
                missing = ", ".join(member.name for member in pending.values())
                raise StartupFailed(f"{missing} did not {what} within {patience.spent():.0f} s")
        return [answers[member.seat.rank] for member in called]

    def run(self, endpoints: Sequence[WorkerEndpoint]) -> None:
        """Let every rank enter its loop."""
        for member, endpoint in zip(self._members, endpoints, strict=True):
            member.running = member.process.actor.run.options(name=_RUN).remote(endpoint)

    def first_death(self) -> str | None:
        """The first rank whose process is known to have ended, in words; None while all live."""
        return next((member.end_in_words() for member in self._members if member.has_died()), None)

    def dead(self) -> set[int]:
        """Ranks whose process is known to have ended."""
        return {member.seat.rank for member in self._members if member.has_died()}

    def left_by(self, which: Collection[int]) -> set[int]:
        """Tell these ranks to leave their loops. Returns those that did, within a moment."""
        called = [self._members[rank] for rank in which if self._members[rank].running is not None]
        for member in called:
            member.process.actor.stop.remote()
        refs = [member.running for member in called]
        left, _ = ray.wait(refs, num_returns=len(refs), timeout=_LEAVE_WAIT_S) if refs else ([], [])
        return {member.seat.rank for member in called if member.running in left and not member.has_died()}

    def replace(self, which: Collection[int], take_spare: SeatTaker) -> int:
        """End these ranks, if need be, and let spares take their seats, or start others. How many were spares."""
        end_all([self._members[rank].process for rank in which])
        num_spares = 0
        for rank in sorted(which):
            seat = self._members[rank].seat
            spare = take_spare(seat, self._configs[rank])
            num_spares += spare is not None
            self._members[rank] = Rank(seat, spare) if spare is not None else self._spawn(seat)
        return num_spares

    def end(self) -> None:
        """Kill every process, whatever it is doing; also one that is stopped and does not hear Ray."""
        members, self._members = self._members, []
        end_all([member.process for member in members], grace_s=_GRACE_S)

    def _spawn(self, seat: Seat) -> Rank:
        worker_actor: Any = WorkerActor  # what `ray.remote` makes of the class, Ray does not annotate
        config = self._configs[seat.rank]
        options = worker_actor.options(
            num_cpus=1,
            num_gpus=1 if config.device == "cuda" else 0,
            max_restarts=0,  # a rank that Ray restarts by itself cannot rejoin its group
            scheduling_strategy=self._placement.strategy(seat),
        )
        return Rank(seat, ActorProcess(options.remote(seat.rank, config)))


def _answer(member: Rank, what: str, ref: Any) -> Any:
    try:
        return ray.get(ref, timeout=0)
    except RayTaskError as error:
        raise StartupFailed(f"{member.name} could not {what}: {error.cause}") from error.cause
    except RayActorError as error:
        raise StartupFailed(f"{member.end_in_words() or member.name} before it could {what}: {error}") from error
    except GetTimeoutError as error:
        raise StartupFailed(f"{member.name}: the answer to {what} is lost") from error
