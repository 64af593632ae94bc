"""What must hold before anything is started: the port is free, and it is clear which Ray is meant.

Knows ports and where Ray notes its address; starts nothing.
"""

import contextlib
import errno
import os
import socket
from collections.abc import Mapping
from pathlib import Path

from cluster.errors import StartupFailed
from cluster.launch.processes import name_of

_RAY_FOLDER = Path("/tmp/ray")  # where `ray start` notes the address of its cluster
_NOTE = "ray_current_cluster"
_CONNECT_TIMEOUT_S = 0.5
_LISTENING = "0A"
_PORTS_TRIED = 100


def check_port(host: str, port: int) -> None:
    """Raises `StartupFailed`, with a free port to take instead, when `port` cannot be listened on."""
    try:
        _listen_once(host, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise StartupFailed(_busy(host, port)) from None
        if error.errno == errno.EACCES:
            raise StartupFailed(
                f"port {port} needs more rights than this user has; choose one of 1024 or more"
            ) from None
        raise StartupFailed(f"cannot listen on {host}:{port}: {error.strerror or error}") from None


def _listen_once(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections in TIME_WAIT are no holders
        probe.bind((host, port))
        probe.listen(1)


def _busy(host: str, port: int) -> str:
    holder = port_holder(port)
    by = f" by {holder}" if holder else ""
    free = _free_port_above(host, port)
    choice = f"choose another: --port {free}" if free else "choose another with --port"
    return f"port {port} is in use{by}; stop that, or {choice}"


def _free_port_above(host: str, port: int) -> int | None:
    for candidate in range(port + 1, min(port + _PORTS_TRIED, 65536)):
        with contextlib.suppress(OSError):
            _listen_once(host, candidate)
            return candidate
    return None


def port_holder(port: int) -> str | None:
    """The process that listens on `port`, as far as this user may see."""
    inodes = {f"socket:[{inode}]" for table in ("tcp", "tcp6") for inode in _listening_inodes(table, port)}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if any(os.readlink(descriptor) in inodes for descriptor in (process / "fd").iterdir()):
                return name_of(int(process.name))
    return None


def _listening_inodes(table: str, port: int) -> list[str]:
    with contextlib.suppress(OSError):
        rows = [line.split() for line in Path("/proc/net", table).read_text().splitlines()[1:]]
        return [row[9] for row in rows if row[3] == _LISTENING and int(row[1].rpartition(":")[2], 16) == port]
    return []


def running_ray(environment: Mapping[str, str], ray_folder: Path = _RAY_FOLDER) -> str | None:
    """`address (how it is known)` of the Ray cluster that Ray's own tools would use on this machine, if any."""
    address = environment.get("RAY_ADDRESS")
    if address:
        return f"{address} (RAY_ADDRESS)"
    noted = _noted_address(ray_folder)
    return f"{noted} (started by `ray start`)" if noted is not None and answers(noted) else None


def check_noted_ray(environment: Mapping[str, str], ray_folder: Path = _RAY_FOLDER) -> None:
    """Raises `StartupFailed` when the cluster that `auto` means to Ray is gone: Ray would try for a minute."""
    noted = _noted_address(ray_folder)
    if not environment.get("RAY_ADDRESS") and noted is not None and not answers(noted):
        raise StartupFailed(
            f"the Ray cluster noted in {ray_folder / _NOTE} ({noted}) does not answer; "
            f"give the one that is meant with --address HOST:PORT, in Python address=, or delete that file"
        )


def _noted_address(ray_folder: Path) -> str | None:
    """Where `ray start` has last started a cluster on this machine."""
    try:
        return (ray_folder / _NOTE).read_text().strip()
    except OSError:
        return None


def answers(address: str) -> bool:
    """Whether something listens at `HOST:PORT`. Ray itself tries for a minute and more, or aborts the process."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return False
    try:
        socket.create_connection((host, int(port)), _CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def check_ray_choice(address: str | None, environment: Mapping[str, str], ray_folder: Path = _RAY_FOLDER) -> None:
    """Raises `StartupFailed` with the choice when a Ray runs and the user has not said whether to use it."""
    if address is not None:
        return
    running = running_ray(environment, ray_folder)
    if running is not None:
        raise StartupFailed(
            f"a Ray cluster is known here: {running}; choose: --address auto serves on it, "
            f"--address local starts a Ray of its own beside it"
        )
