"""How long a start may take in all, who may cut it short, and where its time went.

Knows seconds; knows nothing of what is started.
"""

import threading
import time
from collections.abc import Callable

from cluster.errors import StartupFailed


class Patience:
    """One deadline over all parts of a start."""

    def __init__(
        self,
        deadline_s: float,
        cancelled: threading.Event | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._deadline_s = deadline_s
        self._cancelled = cancelled
        self._clock = clock
        self._started = self._part_started = clock()
        self.parts: dict[str, float] = {}  # seconds, in order

    def spent(self) -> float:
        """Seconds so far."""
        return self._clock() - self._started

    def left(self) -> float:
        """Seconds to the deadline. Raises `StartupFailed` once somebody has cancelled."""
        if self._cancelled is not None and self._cancelled.is_set():
            raise StartupFailed("the start was cancelled")
        return max(0.0, self._deadline_s - self.spent())

    def note(self, part: str, **within: float) -> None:
        """`part` has taken the time since the last note, but for what is named `within` it, in seconds."""
        now = self._clock()
        self.parts[part] = now - self._part_started - sum(within.values())
        self.parts |= within
        self._part_started = now
