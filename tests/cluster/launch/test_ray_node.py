"""Ray's environment: authentication and HAProxy's files inside the run folder, whatever was set before."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.errors import StartupFailed
from cluster.launch import ray_node
from cluster.launch.ray_node import (
    check_gpus,
    connect_ray,
    join,
    ray_environment,
    start_ray,
    telling_line,
    write_haproxy_starter,
)

_FOLDER = Path("/tmp/shardserve-run-00000000")


def test_authentication_is_by_a_token_in_the_folder() -> None:
    settings = ray_environment(_FOLDER, "serve", {"RAY_AUTH_MODE": "disabled"}, stats_port=1, metrics_port=2)
    assert settings["RAY_AUTH_MODE"] == "token"
    assert Path(settings["RAY_AUTH_TOKEN_PATH"]).parent == _FOLDER


def test_usage_reports_are_off_unless_asked_for() -> None:
    assert ray_environment(_FOLDER, "serve", {}, stats_port=1, metrics_port=2)["RAY_USAGE_STATS_ENABLED"] == "0"
    asked = ray_environment(_FOLDER, "serve", {"RAY_USAGE_STATS_ENABLED": "1"}, stats_port=1, metrics_port=2)
    assert asked["RAY_USAGE_STATS_ENABLED"] == "1"


def test_ranks_are_not_nice_unless_asked_to_be() -> None:
    assert ray_environment(_FOLDER, "serve", {}, stats_port=1, metrics_port=2)["RAY_worker_niceness"] == "0"
    asked = ray_environment(_FOLDER, "serve", {"RAY_worker_niceness": "5"}, stats_port=1, metrics_port=2)
    assert asked["RAY_worker_niceness"] == "5"


def test_serves_controller_looks_less_often_unless_asked_otherwise() -> None:
    name = "RAY_SERVE_CONTROL_LOOP_INTERVAL_S"
    assert ray_environment(_FOLDER, "serve", {}, stats_port=1, metrics_port=2)[name] == "0.25"
    assert ray_environment(_FOLDER, "serve", {name: "0.1"}, stats_port=1, metrics_port=2)[name] == "0.1"


def test_haproxy_keeps_everything_in_the_folder() -> None:
    settings = ray_environment(_FOLDER, "haproxy", {}, stats_port=8501, metrics_port=8502)
    assert settings["RAY_SERVE_ENABLE_HA_PROXY"] == settings["RAY_SERVE_THROUGHPUT_OPTIMIZED"] == "1"
    assert settings["RAY_SERVE_HAPROXY_STATS_PORT"] == "8501"
    assert settings["RAY_SERVE_HAPROXY_METRICS_PORT"] == "8502"
    paths = [value for value in settings.values() if value.startswith("/")]
    assert len(paths) == 7
    assert all(Path(path).is_relative_to(_FOLDER) for path in paths)
    sockets = [Path(value) for name, value in settings.items() if name.endswith("SOCKET_PATH")]
    assert all(len(str(path.parent / ("f" * 56) / path.name)) <= 97 for path in sockets)


def test_haproxy_is_started_outside_the_terminals_process_group(tmp_path: Path) -> None:
    binary = tmp_path / "a binary"
    binary.write_text(f"#!{sys.executable}\nimport os, sys\nprint(os.getsid(0) == os.getpid(), sys.argv[1:])\n")
    binary.chmod(0o700)
    settings = ray_environment(tmp_path, "haproxy", {}, stats_port=1, metrics_port=2)
    write_haproxy_starter(tmp_path, {"RAY_SERVE_HAPROXY_BINARY_PATH": str(binary)})
    command = [settings["RAY_SERVE_HAPROXY_BINARY_PATH"], "-f", "a file"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout == "True ['-f', 'a file']\n"


def test_haproxy_is_the_one_that_ray_brings(tmp_path: Path) -> None:
    write_haproxy_starter(tmp_path, {})
    found = subprocess.run([tmp_path / "haproxy", "-v"], capture_output=True, text=True, timeout=60, check=True)
    assert "HAProxy" in found.stdout


def test_serves_own_proxy_is_set_explicitly() -> None:
    settings = ray_environment(_FOLDER, "serve", {"RAY_SERVE_ENABLE_HA_PROXY": "1"}, stats_port=1, metrics_port=2)
    assert settings["RAY_SERVE_ENABLE_HA_PROXY"] == settings["RAY_SERVE_THROUGHPUT_OPTIMIZED"] == "0"


def test_a_running_clusters_proxy_cannot_be_chosen() -> None:
    with pytest.raises(StartupFailed, match="RAY_SERVE_ENABLE_HA_PROXY"):
        connect_ray("auto", "haproxy")


def test_ray_client_is_refused() -> None:
    with pytest.raises(StartupFailed, match="Ray Client cannot carry streams"):
        connect_ray("ray://host:10001", None)


def test_an_address_where_nothing_answers_is_refused_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(StartupFailed, match=f"nothing answers at '{address}'"):
        connect_ray(address, None)


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("Failed to start GCS.  Last 0 lines of error files:\n\n.Please check x for details", ".Please check x"),
        ("Failed to start GCS.  Last 1 lines of error files:\nE no port\n.Please check x", "E no port"),
        ("one line", "one line"),
        ("only a heading:", "only a heading:"),
        ("", "RuntimeError"),
    ],
)
def test_the_line_that_says_something_is_shown(message: str, line: str) -> None:
    assert telling_line(RuntimeError(message)).startswith(line.lstrip("."))


def test_a_cluster_that_lets_nobody_in_is_told_with_the_token_that_was_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import ray

    def refuse(**settings: object) -> None:
        raise ConnectionError("Failed to connect to Ray cluster")

    monkeypatch.setattr(ray, "init", refuse)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        pytest.raises(StartupFailed, match="Failed to connect to Ray cluster; something answers there") as failure,
    ):
        join(f"127.0.0.1:{server.getsockname()[1]}")
    assert "RAY_AUTH_MODE is disabled here" in str(failure.value)
    assert "RAY_AUTH_TOKEN_PATH" in str(failure.value)


def test_a_start_that_fails_once_is_tried_again_in_an_empty_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_node, "_start_once", _FailingStart(1))
    assert start_ray(tmp_path, ranks=1) == "10.0.0.1:6379"
    assert not (tmp_path / "ray").exists()


def test_a_start_that_fails_twice_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_node, "_start_once", _FailingStart(2))
    with pytest.raises(
        StartupFailed, match=r"^Ray does not start, tried twice: try 2 took too long; .* when less runs here$"
    ):
        start_ray(tmp_path, ranks=1)


def test_a_machine_with_too_few_gpus_is_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 8.0, "GPU": 1.0})
    check_gpus(1)
    with pytest.raises(
        StartupFailed, match="device cuda: 2 ranks need a GPU each, and Ray finds 1 on this machine"
    ):
        check_gpus(2)
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 8.0})
    check_gpus(0)


class _FailingStart:
    """In place of `ray.init`: leaves files and fails, as often as asked."""

    def __init__(self, failures: int) -> None:
        self._failures = failures
        self._tries = 0

    def __call__(self, folder: Path, ranks: int) -> str:
        self._tries += 1
        if self._tries <= self._failures:
            (folder / "ray" / "session").mkdir(parents=True)
            raise RuntimeError(f"try {self._tries} took too long")
        return "10.0.0.1:6379"
