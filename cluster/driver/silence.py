"""How long the other side has said nothing while we were listening.

A stall of our own process is not the other's silence: what was sent meanwhile is still to be read. Knows a clock
and how often it is looked at; knows nothing of leases or drivers.
"""

from collections.abc import Callable


class Silence:
    """Look every `look_s`. A look that comes late counts as one that came in time, so no stall ends a silence."""

    def __init__(self, clock: Callable[[], float], *, limit_s: float, look_s: float) -> None:
        self._clock = clock
        self._limit_s = limit_s
        self._look_s = look_s
        self._looked_at = clock()
        self._lasts_s = 0.0

    def end(self) -> None:
        """The other side has said something."""
        self._lasts_s = 0.0

    @property
    def lasts_s(self) -> float:
        """How long we have listened in vain, as of the last look."""
        return self._lasts_s

    def too_long(self) -> bool:
        """Look, and tell whether we have listened in vain for more than the limit."""
        now = self._clock()
        self._lasts_s += min(now - self._looked_at, self._look_s)
        self._looked_at = now
        return self._lasts_s > self._limit_s
