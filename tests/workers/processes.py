"""Ranks as real processes, ended with the test that started them.

They are forked from a server process that has loaded torch and has no threads: quick, and safe beside pytest's
own threads. A target is a module-level function `target(rank, connection, *args)`.
"""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

DEADLINE_S = 150.0


class Rank:
    """One process and the pipe to it."""

    def __init__(self, process: Any, connection: Connection) -> None:
        self._process = process
        self._connection = connection

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    def send(self, value: Any) -> None:
        self._connection.send(value)

    def receive(self) -> Any:
        """What the process sent. Fails when it ends, or is silent for long."""
        assert self._connection.poll(DEADLINE_S), f"process {self.pid} said nothing for {DEADLINE_S} s"
        return self._connection.recv()

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.join()

    def join(self) -> None:
        self._process.join(DEADLINE_S)
        assert self._process.exitcode is not None, f"process {self.pid} did not end"


@contextlib.contextmanager
def spawn_ranks(target: Callable[..., None], size: int, *args: Any) -> Iterator[list[Rank]]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["workers.worker"])
    ranks = []
    processes = []
    try:
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=target, args=(rank, theirs, *args), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            ranks.append(Rank(process, ours))
        yield ranks
    finally:
        for process in processes:
            process.kill()
            process.join(DEADLINE_S)
