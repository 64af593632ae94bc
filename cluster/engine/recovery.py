"""Bringing lost ranks back: how often, after what pause, and in a thread of its own.

A restart may take as long as a start, and meanwhile the engine's thread goes on taking aborts and submissions.
Knows an executor and time; knows nothing of requests, plans or Ray.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping

from cluster.engine.executor import Executor, ExecutorFailed

_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 10.0

_log = logging.getLogger(__name__)


class RecoveryBudget:
    """At most `most` restarts in any `window_s`. The first after a step that ran is made at once; those that
    follow without one wait, each twice as long as the last.
    """

    def __init__(self, most: int, window_s: float) -> None:
        self._most = most
        self._window_s = window_s
        self._taken: deque[float] = deque()
        self._pause_s = 0.0

    def take(self, now: float) -> float | None:
        """Seconds to wait before the next restart; None when there is none left."""
        while self._taken and now - self._taken[0] >= self._window_s:
            self._taken.popleft()
        if len(self._taken) >= self._most:
            return None
        self._taken.append(now)
        pause_s, self._pause_s = self._pause_s, min(_LONGEST_PAUSE_S, 2 * self._pause_s or _FIRST_PAUSE_S)
        return pause_s

    def spent(self) -> str:
        """In words, once it is."""
        if self._most == 0:
            return "restarts are off"
        return f"given up after {self._most} restarts within {self._window_s:g} s"

    def note_step(self) -> None:
        """A step ran: the next failure is a new one."""
        self._pause_s = 0.0

    def give_back(self, count: int) -> None:
        """The last restarts were no fault of the ranks."""
        for _ in range(min(count, len(self._taken))):
            self._taken.pop()


class Restart:
    """One call of `Executor.restart`. The executor belongs to its thread until `done`."""

    def __init__(self, executor: Executor, pause_s: float, on_done: Callable[[], None]) -> None:
        self._executor = executor
        self._pause_s = pause_s
        self._on_done = on_done
        self._cancelled = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-restart", daemon=True)
        self.done = False
        self.error: Exception | None = None
        self.parts: Mapping[str, float] = {}  # where its time went, once it is done

    def start(self) -> None:
        self._thread.start()

    def cancel(self, deadline_s: float) -> None:
        """Give up and wait for the thread to end."""
        self._cancelled.set()
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            _log.error("the restart of the ranks did not end within %.1f s after it was cancelled", deadline_s)

    def _run(self) -> None:
        try:
            if self._cancelled.wait(self._pause_s):
                raise ExecutorFailed("the restart was cancelled")
            self.parts = self._executor.restart(self._cancelled)
        except Exception as error:  # handed to the engine's thread, which decides
            self.error = error
        finally:
            self.done = True
            self._on_done()
