"""One actor as a process: seen to end, and made to end.

A process of this node is watched and killed through its pidfd, which answers within milliseconds and cannot mean
another process; one on another node through Ray, and through a guard there. Knows actors and processes; knows
nothing of what they do.
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

from cluster.driver import exits
from cluster.driver.node_guard import NodeGuard

logger = logging.getLogger(__name__)

_REAP_WAIT_S = 2.0  # for a killed process to be gone


@dataclass(slots=True)
class ActorProcess:
    """`pidfd` is set once a pid of this node is known, `guard` once it is one of another node."""

    actor: Any
    pid: int | None = None
    pidfd: int | None = None
    guard: NodeGuard | None = None
    log: str = ""  # the file that its stderr goes to, if it is known
    oom_kills: int = 0  # on this node, when it was first watched

    def watch(self, pid: int, log: str = "") -> None:
        """It is this process of this node. Idempotent."""
        self.pid, self.log = pid, log
        if self.pidfd is None:
            self.oom_kills = exits.oom_kills()
            with suppress(ProcessLookupError):  # gone already: the next call says so
                self.pidfd = os.pidfd_open(pid)

    def watch_from(self, guard: NodeGuard, pid: int, log: str) -> None:
        """It is this process of the guard's node."""
        self.guard, self.pid, self.log = guard, pid, log
        guard.watch(pid, log)

    def has_ended(self) -> bool:
        """Whether it is seen to have ended, which it cannot be on another node."""
        return self.pidfd is not None and self.ends_within(0)

    def last_words(self) -> str | None:
        """Of one that has ended: how, and the last lines of its log; None where nobody can tell."""
        if self.pid is None:
            return None
        if self.pidfd is not None:
            return exits.last_words(self.pidfd, self.pid, self.log, oom_kills_before=self.oom_kills)
        return None if self.guard is None else self.guard.last_words(self.pid)

    def dismiss(self) -> None:
        """Let Ray end it, which takes Ray a while."""
        with suppress(RayError):
            ray.kill(self.actor, no_restart=True)

    def kill(self) -> None:
        """End it now, whatever it is doing: Ray needs forever with a process that is stopped."""
        if self.pidfd is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        elif self.guard is not None and self.pid is not None:
            self.guard.kill(self.pid)

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
