"""One served cluster on this machine, from a model's name to the first token, and back to nothing.

Owns the order of starting and ending, and what overlaps. Leaves Ray, Serve, folders and signals to its neighbours;
knows nothing of command lines.
"""

import logging
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import httpx
from pydantic import Field

from cluster.config import ClusterConfig
from cluster.driver.resolution import ModelFiles, check_model
from cluster.errors import ShardserveError, StartupFailed
from cluster.launch import ray_node, serving
from cluster.launch.preflight import check_port, check_ray_choice
from cluster.launch.processes import children_named, is_running, name_of
from cluster.launch.progress import Progress
from cluster.launch.run_folder import RunFolder, reclaim_abandoned
from cluster.launch.running import note_address
from model_shards.errors import ModelError

_log = logging.getLogger(__name__)

APPLICATION = "shardserve"
# HAProxy makes more tokens a second, but leaves clients waiting when an ingress dies.
AUTO_PROXY: ray_node.Proxy = "serve"
_DAEMONS = ("gcs_server", "raylet")
_RAY_GRACE_S = 3.0  # Ray's daemons end within two seconds of a shutdown
_WATCH_S = 0.1  # between looks at the daemons while something ends
_SEARCH_HEAD_START_S = 1.0  # for what is on this disk already to turn out unfit before processes start
_DELETE_DEADLINE_S = 30.0  # for Serve to end replicas, which end their ranks
_FIRST_TOKEN_DEADLINE_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """Where to serve, and on which Ray."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    address: str | None = None  # None or "local": a Ray of our own; else the address of one that runs
    proxy: Literal["auto", "serve", "haproxy"] = "auto"

    @property
    def owns_ray(self) -> bool:
        return self.address in (None, "local")

    @property
    def url(self) -> str:
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host and host[0] != '[' else host}:{self.port}"


class Launch:
    """Start once, stop once, in the main thread. `stop` leaves no process, folder or socket, whatever failed."""

    def __init__(self, config: ClusterConfig, options: LaunchOptions, progress: Progress) -> None:
        self.config = config
        self.options = options
        self.ray_address = ""
        self._progress = progress
        self._folder: RunFolder | None = None
        self._is_connected = False
        self._owns_serve = False
        self._is_deployed = False
        self._is_running = False
        self._daemons: dict[int, str] = {}  # pid -> what people call it

    def start(self, *, after_ray: Callable[[], None] = lambda: None) -> None:
        """Returns when a token has been made over HTTP. Raises `StartupFailed` or `ModelError`.

        `after_ray` is called once Ray has started, which takes the signals for itself.
        """
        check_ray_choice(self.options.address, os.environ)
        if self.options.owns_ray:
            reclaim_abandoned()  # which may hold the port
            check_port(self.options.host, self.options.port)
        search = _ModelSearch(self.config, self._progress.note)
        search.start()
        with self._progress.part("Ray"):
            self._start_ray(search)
        after_ray()
        with self._progress.part("HTTP"):
            self._start_serve()
        path = self._found_model(search)
        with self._progress.part("model loaded"):
            self._deploy(path)
        self._is_running = True
        with self._progress.part("first token"):
            make_a_token(self.options.url, self.config.model_name, deadline_s=_FIRST_TOKEN_DEADLINE_S)

    def _start_ray(self, search: "_ModelSearch") -> None:
        if not self.options.owns_ray:
            search.join()
            search.raise_failure()
            proxy = None if self.options.proxy == "auto" else self.options.proxy
            self.ray_address = ray_node.connect_ray(self.options.address or "auto", proxy)
            self._is_connected = True
            return
        self._folder = RunFolder.take()
        os.environ.update(self._ray_environment(self._folder.path))
        search.join(_SEARCH_HEAD_START_S)
        search.raise_failure()
        self._is_connected = True
        ranks = self.config.replicas * self.config.tensor_parallel_size
        self.ray_address = ray_node.start_ray(self._folder.path, ranks=ranks)
        ray_node.check_gpus(ranks if self.config.device == "cuda" else 0)
        self._daemons = {pid: name_of(pid) for pid in children_named(_DAEMONS)}
        note_address(self._folder.path, self.ray_address)

    def _ray_environment(self, folder: Path) -> dict[str, str]:
        stats_port, metrics_port = _free_ports(2)
        proxy = AUTO_PROXY if self.options.proxy == "auto" else self.options.proxy
        if proxy == "haproxy":
            ray_node.write_haproxy_starter(folder, os.environ)
        return ray_node.ray_environment(
            folder, proxy, os.environ, stats_port=stats_port, metrics_port=metrics_port
        )

    def _start_serve(self) -> None:
        if not self.options.owns_ray and serving.is_serve_running():
            serving.check_joinable(APPLICATION, self.options.port)
            return
        if not self.options.owns_ray:
            check_port(self.options.host, self.options.port)
        self._owns_serve = True
        serving.start_serve(self.options.host, self.options.port)

    def _found_model(self, search: "_ModelSearch") -> Path:
        if search.is_alive():
            with self._progress.part("model fetched"):
                search.join()
        return search.result()

    def _deploy(self, path: Path) -> None:
        from cluster.application import build

        config = self.config
        if self.options.owns_ray:  # every process is on this machine: none has to look for the model again
            config = config.with_files(path)
        self._is_deployed = True
        serving.deploy(build(config), APPLICATION)
        serving.wait_running(APPLICATION, deadline_s=config.start_deadline_s, on_line=self._progress.say)

    @property
    def has_begun(self) -> bool:
        """Whether there is anything to end."""
        return self._is_connected or self._folder is not None

    @property
    def logs(self) -> Path | None:
        """Where the processes of this launch log, while it lives; None on a Ray of someone else."""
        return None if self._folder is None else ray_node.logs_in(self._folder.path)

    def failure(self) -> str | None:
        """Why this launch can serve no longer, as far as this process sees it; None while it can."""
        gone = [name for pid, name in self._daemons.items() if not is_running(pid)]
        return f"Ray's {' and '.join(gone)} has ended, and with it this Ray" if gone else None

    def stop(self) -> None:
        """Drain, then end and remove everything that was started. Idempotent."""
        try:
            if self._is_connected:
                self._while_ray_lives(self._stop_serve)
                self._while_ray_lives(ray_node.stop_ray)
        finally:
            self._is_connected = False
            if self._folder is not None:
                killed = self._folder.close(grace_s=_RAY_GRACE_S)
                self._folder = None
                if killed:
                    _log.warning("had to kill %s", ", ".join(killed))

    def _while_ray_lives(self, end: Callable[[], None]) -> None:
        """Run `end`, but wait for it no longer than Ray's daemons live.

        A signal to the whole process group ends them under a call that runs, and Ray then tries for a minute and
        aborts this process, before the folder is closed.
        """
        if self.failure() is not None:
            return
        ending = _Ending(end)
        ending.start()
        while ending.is_alive() and self.failure() is None:
            ending.join(_WATCH_S)
        if ending.failure is not None:
            raise ending.failure

    def _stop_serve(self) -> None:
        if self._is_running and not serving.drain(APPLICATION, deadline_s=self.config.drain_deadline_s):
            _log.warning("some requests had not finished after %g s and are cut", self.config.drain_deadline_s)
        self._is_running = False
        if self._is_deployed and not serving.delete(APPLICATION, deadline_s=_DELETE_DEADLINE_S):
            _log.warning("Serve has not taken the application away within %g s", _DELETE_DEADLINE_S)
        self._is_deployed = False
        if self._owns_serve and not self.options.owns_ray:  # a Ray of our own takes Serve with it
            serving.stop_serve()
        self._owns_serve = False

    def end_hard(self) -> None:
        """Kill what was started, remove the folder and end this process now."""
        if self._folder is not None:
            self._folder.close(grace_s=0)
        os._exit(130)


class _Ending(threading.Thread):
    """A call that may never return, with what it raised."""

    def __init__(self, call: Callable[[], None]) -> None:
        super().__init__(name="ending", daemon=True)
        self._call = call
        self.failure: Exception | None = None

    def run(self) -> None:
        try:
            self._call()
        except Exception as error:  # raised again in the thread that waits
            self.failure = error


class _ModelSearch(threading.Thread):
    """Finds or fetches the model while Ray starts, and looks whether it can be served as it is asked for.

    A daemon: an abandoned download must not hold the exit back.
    """

    def __init__(self, config: ClusterConfig, on_progress: Callable[[str], None]) -> None:
        super().__init__(name="model-search", daemon=True)
        self._config = config
        self._on_progress = on_progress
        self._path: Path | None = None
        self._failure: Exception | None = None

    def run(self) -> None:
        try:
            files = ModelFiles.of(self._config.model, self._on_progress)
            check_model(self._config, files.spec)
            self._path = files.path
        except (ModelError, ShardserveError, OSError) as error:  # raised again in the thread that waits
            self._failure = error

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def result(self) -> Path:
        self.join()
        self.raise_failure()
        if self._path is None:
            raise StartupFailed(f"the search for model {self._config.model!r} broke off")
        return self._path


def make_a_token(url: str, model: str, *, deadline_s: float) -> None:
    """Ask for one token over HTTP. Raises `StartupFailed` with what came instead."""
    body = {"model": model, "prompt": "Hello", "max_tokens": 1, "temperature": 0}
    try:
        response = httpx.post(f"{url}/v1/completions", json=body, timeout=deadline_s, trust_env=False)
    except httpx.HTTPError as error:
        raise StartupFailed(f"no first token from {url}: {type(error).__name__}: {error}") from error
    if response.status_code != 200:
        raise StartupFailed(f"no first token from {url}: HTTP {response.status_code}: {response.text[:300]}")


def _free_ports(count: int) -> list[int]:
    """Ports nobody listens on now. HAProxy offers no way to hand over a socket that is already bound."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports
