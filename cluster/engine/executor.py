"""The engine's way to the ranks: plans in, results out, in order.

Knows plans and results; knows nothing of Ray, sockets or tensors. `cluster.driver` has the real ones,
`tests.fakes.scripted_executor` one without torch.
"""

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
    """One incarnation of a worker group. Owned by the engine's thread once the engine has started."""

    @property
    def capacity(self) -> Capacity: ...

    @property
    def incarnation(self) -> int: ...

    def submit(self, plan: StepPlan) -> None:
        """Hand `plan` to every rank without waiting. Raises `ExecutorFailed`."""
        ...

    def take_result(self, timeout_s: float) -> StepResult:
        """The result of the oldest step not yet taken. Raises `ExecutorFailed` on death, failure or timeout."""
        ...

    def stop(self) -> None:
        """End the ranks and free what they held. Idempotent, never raises."""
        ...
