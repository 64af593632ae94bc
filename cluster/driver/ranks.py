"""The worker actors of one group as processes: started in their seats, called together, replaced and ended.

Knows actors and processes; knows no plans and no models.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import ray

from cluster.driver.actor_process import ActorProcess, end_all
from cluster.driver.node_guard import NodeGuard
from cluster.driver.patience import Patience
from cluster.driver.placement import Placement, Seat
from cluster.driver.rank import Rank
from cluster.errors import StartupFailed
from workers.actor import WorkerActor
from workers.channel import WorkerEndpoint
from workers.config import WorkerConfig
from workers.reports import CodeIdentity, WorkerIdentity

SeatTaker = Callable[[Seat, WorkerConfig], ActorProcess | None]

_LEAVE_WAIT_S = 2.0  # for a rank to leave its loop once it is told
_LOOK_S = 0.1  # between looks at who has died, while answers are awaited
_TOLD_WITHIN_S = 1.0  # for Ray to say why it has ended a rank, whose end the kernel tells at once
_GRACE_S = 1.0  # for Ray to end ranks that nobody waits for
_RUN = "WorkerActor.run"  # what `ps` shows of a rank, also of one that was a spare


class Ranks:
    """All ranks of a group, in order. `end()` leaves no process of theirs; it is idempotent."""

    def __init__(self, placement: Placement, configs: Sequence[WorkerConfig]) -> None:
        self._placement = placement
        self._configs = tuple(configs)
        self._here = ray.get_runtime_context().get_node_id()
        self._guards: dict[str, NodeGuard] = {}  # of other nodes
        self._set_guards({seat.node_id: seat for seat in placement.seats})
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
                member.process.watch(identity.pid, identity.stderr)
            difference = mine.difference(identity.code, same_node=identity.node_id == self._here)
            if difference is not None:
                raise StartupFailed(f"{member.name} runs other code than the driver: {difference}")
        self._guard_other_nodes()
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
                answers[member.seat.rank] = answer = member.answer(what, done[0])
                if on_answer is not None:
                    on_answer(member, answer)
            elif (dead := self._first_dead()) is not None:
                raise StartupFailed(_why(dead, what, pending))
            elif left_s == 0:
                missing = ", ".join(member.name for member in pending.values())
                raise StartupFailed(f"{missing} did not {what} within {patience.spent():.0f} s")
        return [answers[member.seat.rank] for member in called]

    def run(self, endpoints: Sequence[WorkerEndpoint]) -> None:
        """Let every rank enter its loop."""
        for member, endpoint in zip(self._members, endpoints, strict=True):
            member.running = member.process.actor.run.options(name=_RUN).remote(endpoint)

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
        self._set_guards({})

    def _guard_other_nodes(self) -> None:
        """See to a guard on each node that has ranks, and let it watch them."""
        self._set_guards({member.node_id: member.seat for member in self._members})
        for member in self._members:
            guard = self._guards.get(member.node_id)
            if guard is not None and member.identity is not None and member.process.guard is not guard:
                member.process.watch_from(guard, member.identity.pid, member.identity.stderr)

    def _set_guards(self, seats: Mapping[str, Seat]) -> None:
        """One for each of these nodes but the driver's own; those of others, and those that are lost, end."""
        for node_id, guard in list(self._guards.items()):
            if node_id not in seats or guard.is_lost:
                guard.end()
                del self._guards[node_id]
        for node_id, seat in seats.items():
            if node_id != self._here and node_id not in self._guards:
                self._guards[node_id] = NodeGuard(self._placement, seat)

    def _first_dead(self) -> Rank | None:
        """The first rank whose process is known to have ended; None while all live."""
        return next((member for member in self._members if member.has_died()), None)

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


def _why(dead: Rank, what: str, pending: Mapping[Any, Rank]) -> str:
    """Of a rank whose process has ended, perhaps by Ray's hand, for want of memory: Ray says so a little later."""
    ref = next((ref for ref, member in pending.items() if member is dead), None)
    if ref is not None and ray.wait([ref], timeout=_TOLD_WITHIN_S)[0]:
        try:
            dead.answer(what, ref)
        except StartupFailed as failure:
            return str(failure)
    return dead.end_in_words() or f"{dead.name} has ended"
