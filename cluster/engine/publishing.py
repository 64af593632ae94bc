"""Carries deltas from the engine's thread to whoever sends them on, so that no receiver can hold up a step.

Knows deltas and one callback; knows nothing of where they go.
"""

import logging
import queue
import threading
from collections.abc import Callable, Sequence

from cluster.generation import TokenDelta

Publish = Callable[[Sequence[TokenDelta]], None]

_log = logging.getLogger(__name__)


class Publisher:
    """Calls `publish` in a thread of its own, in order. What piles up while one call runs goes with the next."""

    def __init__(self, publish: Publish) -> None:
        self._publish = publish
        self._queue: queue.SimpleQueue[Sequence[TokenDelta] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine-publish", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, deltas: Sequence[TokenDelta]) -> None:
        """Never blocks, never raises."""
        self._queue.put(deltas)

    def close(self, deadline_s: float) -> None:
        """Deliver what was put and end the thread; one that still hangs in `publish` at the deadline is left."""
        self._queue.put(None)
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            _log.error("the publish callback did not return within %.1f s; its last deltas are lost", deadline_s)

    def _run(self) -> None:
        closing = False
        while not closing:
            taken = [self._queue.get()]
            while not self._queue.empty():  # this thread alone takes
                taken.append(self._queue.get())
            closing = taken[-1] is None
            deltas = [delta for batch in taken if batch is not None for delta in batch]
            if deltas:
                self._call(deltas)

    def _call(self, deltas: Sequence[TokenDelta]) -> None:
        try:
            self._publish(deltas)
        except Exception:
            _log.exception("the publish callback failed; %d deltas are lost", len(deltas))
