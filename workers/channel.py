"""The way of the steps: plans from a driver down to its ranks, results and failures up.

One PUSH socket a rank and one PULL for what comes back; `ipc` on one node, `tcp` with CURVE between nodes. A
channel belongs to one incarnation: its addresses and keys are new, and what carries another number is
dropped. Steps arrive in order or not at all. An end is used by one thread at a time; every wait has a deadline.

Knows messages and sockets; knows nothing of Ray, torch or what a step does.
"""

import logging
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from workers.codec import decode, encode
from workers.curve import ClientKeys, Gate
from workers.errors import ChannelError, ChannelInterrupted, ChannelTimeout, ProtocolError
from workers.ownership import Owned, reclaim
from workers.protocol import Message, StepFailure, StepPlan, StepResult, StopWorkers

_log = logging.getLogger(__name__)

_KIND = "steps"
_MAX_IPC_PATH = 107  # bytes: what the kernel takes as the address of a socket file
_SEND_DEADLINE_S = 10.0

Socket = zmq.Socket[bytes]


@dataclass(frozen=True, slots=True)
class WorkerEndpoint:
    """Everything a rank needs to connect, its secret key included: to be handed to that rank and no one else."""

    rank: int
    incarnation: int
    plans: str
    results: str
    keys: ClientKeys | None = None
    driver_pid: int | None = None  # set when driver and worker share a node


class DriverChannel:
    """The driver's end. With `host`, its address as the workers see it, the ranks may be on other nodes."""

    def __init__(
        self, size: int, incarnation: int, *, host: str | None = None, send_deadline_s: float = _SEND_DEADLINE_S
    ) -> None:
        self._incarnation = incarnation
        self.send_deadline_s = send_deadline_s
        self._next_result = 0
        self._waiting = _Waiting()
        self._folder: Owned | None = None
        self._gate: Gate | None = None
        self._context: zmq.Context[Socket] = zmq.Context()
        self._plans: list[Socket] = []
        try:
            if host is None:
                self._folder = _socket_folder()
            else:
                self._gate = Gate(self._context, size)
            clients = () if self._gate is None else self._gate.clients
            self._results, results = self._bind(zmq.PULL, "results", host, clients)
            endpoints = []
            for rank in range(size):
                socket, plans = self._bind(zmq.PUSH, f"plans-{rank}", host, clients[rank : rank + 1])
                self._plans.append(socket)
                keys = clients[rank] if clients else None
                pid = os.getpid() if host is None else None
                endpoints.append(WorkerEndpoint(rank, incarnation, plans, results, keys, pid))
        except (zmq.ZMQError, OSError) as error:
            self.close()
            raise ChannelError(f"the step channel cannot be opened on {host or 'this node'}: {error}") from error
        self.endpoints = tuple(endpoints)

    def watch(self, fd: int, meaning: str) -> None:
        """Let `fd`, a rank's pidfd say, cut waits short with `ChannelInterrupted(meaning)` once readable."""
        self._waiting.watch(fd, meaning)

    def unwatch(self, fd: int) -> None:
        """Forget `fd`. Before it is closed."""
        self._waiting.unwatch(fd)

    def send(self, message: StepPlan | StopWorkers) -> None:
        """Hand `message` to every rank. Waits only for ranks that are not connected.

        Raises `ChannelTimeout` naming the rank that cannot be reached, `ChannelInterrupted` when a watched
        descriptor is readable.
        """
        data = encode(message)
        deadline = time.monotonic() + self.send_deadline_s
        for rank, socket in enumerate(self._plans):
            _send(socket, data, self._waiting, deadline, f"rank {rank} to take a message")

    def receive(self, timeout_s: float) -> StepResult | StepFailure:
        """The next result, or a failure of any rank. What has arrived comes before any interruption.

        Raises `ChannelTimeout`, `ChannelInterrupted`, and `ProtocolError` for a result out of order.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            message = decode(_receive(self._results, self._waiting, deadline, "the ranks"))
            if not isinstance(message, StepResult | StepFailure):
                raise ProtocolError(f"a worker sent a {type(message).__name__}")
            if not _is_current(message, self._incarnation):
                continue
            if isinstance(message, StepResult):
                if message.step != self._next_result:
                    raise ProtocolError(f"the result of step {message.step} came, expected {self._next_result}")
                self._next_result += 1
            return message

    def close(self, flush_s: float = 0.0) -> None:
        """Close the sockets and remove their files; wait at most `flush_s` for what was sent. Idempotent."""
        if self._gate is not None:
            self._gate.close()
        self._context.destroy(linger=int(flush_s * 1000))
        if self._folder is not None:
            self._folder.close()

    def _bind(self, kind: int, name: str, host: str | None, clients: tuple[ClientKeys, ...]) -> tuple[Socket, str]:
        socket = self._context.socket(kind)
        socket.linger = 0
        if self._gate is not None:
            self._gate.guard(socket, name, clients)
        if self._folder is not None:
            socket.bind(f"ipc://{self._folder.path / name}")
        else:
            socket.ipv6 = ":" in str(host)
            socket.bind(f"tcp://[{host}]:*" if ":" in str(host) else f"tcp://{host}:*")
        return socket, socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")


class WorkerChannel:
    """A rank's end."""

    def __init__(self, endpoint: WorkerEndpoint, *, send_deadline_s: float = _SEND_DEADLINE_S) -> None:
        self._endpoint = endpoint
        self._send_deadline_s = send_deadline_s
        self._next_step = 0
        self._waiting = _Waiting()
        self._context: zmq.Context[Socket] = zmq.Context()
        try:
            self._plans = self._connect(zmq.PULL, endpoint.plans)
            self._results = self._connect(zmq.PUSH, endpoint.results)
        except zmq.ZMQError as error:
            self.close()
            raise ChannelError(f"rank {endpoint.rank} cannot open the step channel: {error}") from error

    def watch(self, fd: int, meaning: str) -> None:
        """Let `fd` cut waits short with `ChannelInterrupted(meaning)` once it is readable."""
        self._waiting.watch(fd, meaning)

    def receive(self, timeout_s: float) -> StepPlan | StopWorkers:
        """The next plan, or the stop.

        Raises `ChannelTimeout`, `ChannelInterrupted`, and `ProtocolError` for a plan out of order.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            message = decode(_receive(self._plans, self._waiting, deadline, "the driver"))
            if not isinstance(message, StepPlan | StopWorkers):
                raise ProtocolError(f"the driver sent a {type(message).__name__}")
            if not _is_current(message, self._endpoint.incarnation):
                continue
            if isinstance(message, StepPlan):
                if message.step != self._next_step:
                    raise ProtocolError(f"the plan of step {message.step} came, expected {self._next_step}")
                self._next_step += 1
            return message

    def send(self, message: StepResult | StepFailure) -> None:
        """Hand `message` to the driver. Raises `ChannelTimeout` when it cannot be reached."""
        deadline = time.monotonic() + self._send_deadline_s
        _send(self._results, encode(message), self._waiting, deadline, "the driver to take a message")

    def close(self, flush_s: float = 0.0) -> None:
        """Close the sockets; wait at most `flush_s` for what was sent to leave. Idempotent."""
        self._context.destroy(linger=int(flush_s * 1000))

    def _connect(self, kind: int, address: str) -> Socket:
        socket = self._context.socket(kind)
        socket.linger = 0
        if self._endpoint.keys is not None:
            self._endpoint.keys.apply(socket)
        socket.ipv6 = address.startswith("tcp://[")
        socket.connect(address)
        return socket


class _Waiting:
    """Waits for a socket, and for the descriptors that may cut the wait short."""

    def __init__(self) -> None:
        self._watched: dict[int, str] = {}

    def watch(self, fd: int, meaning: str) -> None:
        self._watched[fd] = meaning

    def unwatch(self, fd: int) -> None:
        self._watched.pop(fd, None)

    def until(self, socket: Socket, event: int, deadline: float, what: str) -> None:
        """Return once `event` holds for `socket`; `what` names in the error what did not happen."""
        entries: list[Any] = [(socket, event), *((fd, zmq.POLLIN) for fd in self._watched)]
        started = time.monotonic()
        remaining_s = max(0.0, deadline - started)
        ready: dict[Any, int] = dict(zmq.zmq_poll(entries, int(remaining_s * 1000 + 0.999)))
        if socket in ready:
            return
        for fd, meaning in self._watched.items():
            if fd in ready:
                raise ChannelInterrupted(f"while waiting for {what}: {meaning}")
        raise ChannelTimeout(f"waited {remaining_s:.3f} s for {what}")


def _send(socket: Socket, data: bytes, waiting: _Waiting, deadline: float, what: str) -> None:
    while True:
        try:
            socket.send(data, zmq.NOBLOCK)
        except zmq.Again:
            waiting.until(socket, zmq.POLLOUT, deadline, what)
        else:
            return


def _receive(socket: Socket, waiting: _Waiting, deadline: float, what: str) -> bytes:
    while True:
        try:
            return socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            waiting.until(socket, zmq.POLLIN, deadline, f"a message from {what}")


def _is_current(message: Message, incarnation: int) -> bool:
    if message.incarnation == incarnation:
        return True
    _log.warning(
        "dropped a %s of incarnation %d, now is %d", type(message).__name__, message.incarnation, incarnation
    )
    return False


def _socket_folder() -> Owned:
    """A folder for socket files, short enough a path for the kernel, after clearing away those of dead drivers."""
    for parent in dict.fromkeys([Path(tempfile.gettempdir()), Path("/tmp")]):
        if not parent.is_dir():
            continue
        reclaim(parent, _KIND)
        folder = Owned.folder(parent, _KIND)
        if len(os.fsencode(folder.path / "plans-99999")) <= _MAX_IPC_PATH:
            return folder
        folder.close()
    raise OSError(f"no temporary folder with a short enough path: {tempfile.gettempdir()} is too long")
