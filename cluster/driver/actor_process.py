"""One actor as a process: seen to end, and made to end.

A process of this node is watched and killed through its pidfd, which answers within milliseconds and cannot mean
another process; one on another node through Ray. Knows actors and processes; knows nothing of what they do.
"""

import logging
import os
import select
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

logger = logging.getLogger(__name__)

_REAP_WAIT_S = 2.0  # for a killed process to be gone


@dataclass(slots=True)
class ActorProcess:
    """`pidfd` is set once a pid of this node is known."""

    actor: Any
    pid: int | None = None
    pidfd: int | None = None

    def watch(self, pid: int) -> None:
        """It is this process of this node. Idempotent."""
        self.pid = pid
        if self.pidfd is None:
            with suppress(ProcessLookupError):  # gone already: the next call says so
                self.pidfd = os.pidfd_open(pid)

    def has_ended(self) -> bool:
        """Whether it is seen to have ended, which it cannot be on another node."""
        return self.pidfd is not None and self.ends_within(0)

    def dismiss(self) -> None:
        """Let Ray end it, which takes Ray a while."""
        with suppress(RayError):
            ray.kill(self.actor, no_restart=True)

    def kill(self) -> None:
        """End it now, whatever it is doing: Ray needs forever with a process that is stopped."""
        if self.pidfd is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def reap(self, within_s: float) -> None:
        """Wait for its end, where it can be seen, and forget it. Idempotent."""
        if self.pidfd is None:
            return
        if not self.ends_within(within_s):
            logger.error("process %s is still alive %g s after SIGKILL", self.pid, _REAP_WAIT_S)
        os.close(self.pidfd)
        self.pidfd = None

    def ends_within(self, seconds: float) -> bool:
        """Wait so long for its end; False, at once, where it cannot be seen."""
        if self.pidfd is None:
            return False
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(seconds * 1000))


def end_all(processes: Sequence[ActorProcess], *, grace_s: float = 0.0) -> None:
    """Kill all of them, then wait until they are gone.

    Without grace, Ray may find them dead before it has ended them, and tells the user of crashed workers.
    """
    for process in processes:
        process.dismiss()
    grace_ends = time.monotonic() + grace_s
    for process in processes:
        process.ends_within(max(0.0, grace_ends - time.monotonic()))
        process.kill()
    deadline = time.monotonic() + _REAP_WAIT_S
    for process in processes:
        process.reap(max(0.0, deadline - time.monotonic()))
