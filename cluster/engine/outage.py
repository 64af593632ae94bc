"""One outage of the ranks, from the last step before it to the first token after it, and where its time went.

Knows seconds and counts; knows nothing of ranks, requests or how they come back.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class OutageReport:
    """An outage that is over. Times are on the engine's clock; the parts add up to `seconds`, in order."""

    cause: str
    noticed_at: float
    seconds: float  # without a step, and without a token when anything was being generated
    parts: tuple[tuple[str, float], ...]

    def __str__(self) -> str:
        """For people: "2140 ms without a token: notice 41, ..."."""
        parts = ", ".join(f"{name} {_ms(seconds)}" for name, seconds in self.parts)
        return f"{_ms(self.seconds)} ms without a token: {parts}"


@dataclass(slots=True)
class Outage:
    """One that lasts. Several restarts belong to it when no token goes out between them."""

    cause: str
    last_step_at: float
    noticed_at: float
    num_tokens: int  # that had gone out before it
    num_steps: int  # that had run when the ranks were lost, the last time
    has_stepped: bool = False  # since then
    found_cause: bool = False  # it was a request, which has been ended
    _restarted_at: float = 0.0
    _restart: Mapping[str, float] = field(default_factory=dict)

    def lose_again(self, cause: str, num_steps: int) -> None:
        """The ranks failed once more before it was over."""
        self.cause = cause
        self.num_steps = num_steps
        self.has_stepped = False

    def restarted(self, now: float, parts: Mapping[str, float]) -> None:
        """The ranks are back, after a restart that took `parts`, in seconds."""
        self._restarted_at = now
        self._restart = parts

    def report(self, now: float) -> OutageReport:
        """Once it is over. Replay is what the ranks compute anew before the first new token."""
        tries = self._restarted_at - self.noticed_at - sum(self._restart.values())
        parts = {
            "notice": self.noticed_at - self.last_step_at,
            "earlier tries": tries,
            **self._restart,
            "replay": now - self._restarted_at,
        }
        return OutageReport(self.cause, self.noticed_at, now - self.last_step_at, tuple(parts.items()))


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f}"
