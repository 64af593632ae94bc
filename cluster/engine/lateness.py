"""Whether the ranks have been at a step for so long that something is wrong: health asks that before any deadline.

A step of a large model may take seconds, so each is judged by those before it. Knows plans and time; knows nothing
of what becomes of ranks that are late.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from cluster.engine.config import EngineConfig
from workers.protocol import StepPlan

_TIMES = 3.0  # as long as the longest of the last steps, and more for one with more tokens
_KEPT = 0.98  # of the longest and the largest, with each step: what was long ago is forgotten in a few hundred


@dataclass(frozen=True, slots=True)
class _Awaited:
    what: str
    num_tokens: int  # 0: a heartbeat
    since: float
    late_after_s: float


class Lateness:
    """Told when a result is awaited and when it is there, by the engine's thread; any thread may read it."""

    def __init__(self, config: EngineConfig, clock: Callable[[], float]) -> None:
        self._config = config
        self._clock = clock
        self._awaited: _Awaited | None = None
        self._longest_s = 0.0
        self._most_tokens = 0.0

    @property
    def cause(self) -> str | None:
        """Why the ranks are taken for stuck; None while they are in time."""
        awaited = self._awaited
        if awaited is None:
            return None
        waited_s = self._clock() - awaited.since
        if waited_s <= awaited.late_after_s:
            return None
        return f"the ranks have not answered {awaited.what} for {waited_s:.1f} s"

    def begin(self, plan: StepPlan) -> None:
        """The result of `plan` is awaited from now on."""
        num_tokens = sum(new.num_new_tokens for new in plan.new) + sum(
            known.num_new_tokens for known in plan.known
        )
        what = "a step" if num_tokens else "a heartbeat"
        self._awaited = _Awaited(what, num_tokens, self._clock(), self._late_after_s(num_tokens))

    def end(self) -> None:
        """It is there."""
        awaited, self._awaited = self._awaited, None
        if awaited is not None and awaited.num_tokens:
            self._longest_s = max(self._clock() - awaited.since, _KEPT * self._longest_s)
            self._most_tokens = max(awaited.num_tokens, _KEPT * self._most_tokens)

    def forget(self) -> None:
        """It will not come: the ranks are lost."""
        self._awaited = None

    def _late_after_s(self, num_tokens: int) -> float:
        if num_tokens == 0:
            return self._config.heartbeat_late_s
        if self._most_tokens == 0:
            return math.inf  # nobody knows yet how long a step takes
        usual_s = self._longest_s * max(1.0, num_tokens / self._most_tokens)
        return max(self._config.step_late_s, _TIMES * usual_s)
