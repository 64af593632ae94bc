"""Hears of the end of a rank, for one incarnation of a group.

A rank on the driver's node is heard of through its pidfd, within milliseconds; one on another node through the end
of its `run()` call, some 50 ms after Ray knows. Knows ranks; knows nothing of steps.
"""

import os
import select
import threading
from collections.abc import Sequence
from contextlib import suppress

from cluster.driver.rank import Rank

_NEAR_PERIOD_S = 0.5  # between looks at the run() calls, of ranks that have a pidfd
_FAR_PERIOD_S = 0.05  # when they are all there is for some rank


class DeathWatch:
    """`fd` becomes readable once a rank has ended, and `cause` says which one and how. Close it when done."""

    def __init__(self, members: Sequence[Rank]) -> None:
        self.cause: str | None = None
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._members = members
        self._ended = threading.Event()
        self._closing = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="rank-watch", daemon=True)
        self._thread.start()

    def cause_within(self, patience_s: float) -> str | None:
        """What has ended, or ends within a moment: a peer that suffers from it may be heard of first."""
        self._ended.wait(patience_s)
        return self.cause

    def close(self) -> None:
        """Idempotent. The ranks' descriptors may be closed afterwards."""
        if self.fd < 0:
            return
        os.eventfd_write(self._closing, 1)
        self._thread.join()
        os.close(self._closing)
        os.close(self.fd)
        self.fd = -1

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._closing, select.POLLIN)
        for member in self._members:
            if member.process.pidfd is not None:
                poll.register(member.process.pidfd, select.POLLIN)
        far = any(member.process.pidfd is None for member in self._members)
        period_ms = (_FAR_PERIOD_S if far else _NEAR_PERIOD_S) * 1000
        while self.cause is None:
            ready = {fd for fd, _ in poll.poll(period_ms)}
            if self._closing in ready:
                return
            self.cause = self._first_end()
        with suppress(OSError):
            os.eventfd_write(self.fd, 1)
        self._ended.set()

    def _first_end(self) -> str | None:
        causes = (member.end_in_words() for member in self._members)
        return next((cause for cause in causes if cause is not None), None)
