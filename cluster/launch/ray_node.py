"""Ray on this machine: its environment, its start inside a run folder, or a connection to one that runs already.

Knows Ray's settings; knows nothing of Serve applications or models. Imports Ray only when it starts, because the
environment has to be set before.
"""

import logging
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from cluster.errors import StartupFailed

Proxy = Literal["serve", "haproxy"]

_OBJECT_STORE_BYTES = 150 * 2**20  # tokens do not pass through the object store: Serve's own few objects do
_TOKEN_FILE = "ray_auth_token"
_RAY_FOLDER = "ray"  # Ray opens its own folder to everybody; the one around it is ours alone


def ray_environment(
    folder: Path, proxy: Proxy, current: Mapping[str, str], *, stats_port: int, metrics_port: int
) -> dict[str, str]:
    """What has to be in the environment before Ray is imported, for a Ray of our own in `folder`.

    Authentication is by a token that lives and dies with the folder, because Ray listens on every interface; left
    to itself Ray would write a token into the user's home, and later clusters would start in another way.
    """
    settings = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(folder / _TOKEN_FILE),
        "RAY_USAGE_STATS_ENABLED": current.get("RAY_USAGE_STATS_ENABLED", "0"),
        "RAY_worker_niceness": current.get("RAY_worker_niceness", "0"),  # Ray's 15 starves ranks on a busy machine
        "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # what daemons say belongs into the log files, not between our lines
        "RAY_SERVE_ENABLE_HA_PROXY": "0",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "0",
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
    }


def start_ray(folder: Path, *, ranks: int) -> str:
    """Start a Ray of our own with its session in `folder`; gives its address. Raises `StartupFailed`."""
    token_file = folder / _TOKEN_FILE
    token_file.touch(mode=0o600)
    token_file.write_text(secrets.token_hex(32), encoding="ascii")
    import ray

    try:
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
    except Exception as error:  # Ray raises bare `Exception` here, as when a daemon is not up within its 30 s
        raise StartupFailed(f"Ray does not start: {_first_line(error)}") from error
    return str(context.address_info["gcs_address"])


def logs_in(folder: Path) -> Path:
    """Where the processes of a Ray started in `folder` log."""
    return folder / _RAY_FOLDER / "session_latest" / "logs"


def connect_ray(address: str, proxy: Proxy | None) -> str:
    """Connect to a running Ray; gives its address. Raises `StartupFailed`."""
    if proxy is not None:
        raise StartupFailed(
            "--proxy is for a Ray that is started here; on a running cluster RAY_SERVE_ENABLE_HA_PROXY and "
            "RAY_SERVE_THROUGHPUT_OPTIMIZED in the environment of every node choose it"
        )
    if "://" in address:
        raise StartupFailed(f"{address}: Ray Client cannot carry streams; run on a node of the cluster instead")
    import ray

    try:
        context: Any = ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    except (RuntimeError, OSError, ValueError, ray.exceptions.RayError) as error:
        raise StartupFailed(f"cannot connect to the Ray cluster at {address!r}: {_first_line(error)}") from error
    return str(context.address_info["gcs_address"])


def stop_ray() -> None:
    """Disconnect, and end Ray's daemons if they are ours. Idempotent."""
    import ray

    ray.shutdown()


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
