"""The engine's way to the ranks: plans in, results out, in order.

Knows plans and results; knows nothing of Ray, sockets or tensors. `cluster.driver` has the real ones,
`tests.fakes.scripted_executor` one without torch.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from workers.protocol import StepPlan, StepResult


class ExecutorFailed(RuntimeError):
    """The worker group cannot go on: a rank died, reported a failure or missed its deadline."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the ranks can hold together; the pool is the minimum over ranks."""

    num_blocks: int
    block_size: int


class Executor(Protocol):
    """A worker group, one incarnation after the other. Used by one thread at a time: the engine's, once it has
    started, or the one in which the engine lets it restart.
    """

    @property
    def capacity(self) -> Capacity:
        """The same in every incarnation: what was accepted must fit after a restart, too."""
        ...

    @property
    def incarnation(self) -> int: ...

    def submit(self, plan: StepPlan) -> None:
        """Hand `plan` to every rank without waiting. Raises `ExecutorFailed`."""
        ...

    def take_result(self, timeout_s: float) -> StepResult:
        """The result of the oldest step not yet taken. Raises `ExecutorFailed` on death, failure or timeout."""
        ...

    def restart(self, cancelled: threading.Event) -> Mapping[str, float]:
        """After a failure: end what is left of the ranks' incarnation and begin the next, which holds nothing.

        Returns where its time went: seconds by part, in order. May take as long as a start. Raises
        `ExecutorFailed` when the ranks do not come back, and soon after `cancelled` is set; it may then be called
        again.
        """
        ...

    def stop(self) -> None:
        """End the ranks and free what they held. Idempotent, never raises."""
        ...
