"""Busy ports and Rays that run already: found before anything starts, and answered with a choice."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.errors import StartupFailed
from cluster.launch.preflight import check_noted_ray, check_port, check_ray_choice, port_holder, running_ray


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_a_free_port_passes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    check_port("127.0.0.1", port)


def test_a_busy_port_names_its_holder_and_a_free_one(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    with pytest.raises(
        StartupFailed, match=rf"port {port} is in use by python\S* \(pid \d+\); .*--port (\d+)"
    ) as failure:
        check_port("127.0.0.1", port)
    check_port("127.0.0.1", int(str(failure.value).rsplit(" ", 1)[1]))


def test_a_port_busy_on_one_address_is_busy_for_all(listener: socket.socket) -> None:
    with pytest.raises(StartupFailed, match="is in use"):
        check_port("0.0.0.0", listener.getsockname()[1])


def test_an_address_of_another_machine() -> None:
    with pytest.raises(StartupFailed, match=r"cannot listen on 203\.0\.113\.1:8000"):
        check_port("203.0.113.1", 8000)


def test_nobody_holds_a_free_port() -> None:
    assert port_holder(1) is None


def test_no_ray(tmp_path: Path) -> None:
    assert running_ray({}, tmp_path) is None
    check_ray_choice(None, {}, tmp_path)


def test_ray_by_environment_asks_for_a_choice(tmp_path: Path) -> None:
    environment = {"RAY_ADDRESS": "10.0.0.5:6379"}
    with pytest.raises(
        StartupFailed, match=r"10.0.0.5:6379 \(RAY_ADDRESS\); choose: --address auto .* --address local"
    ):
        check_ray_choice(None, environment, tmp_path)


@pytest.mark.parametrize("address", ["auto", "local", "10.0.0.5:6379"])
def test_a_choice_is_a_choice(address: str, tmp_path: Path) -> None:
    check_ray_choice(address, {"RAY_ADDRESS": "10.0.0.5:6379"}, tmp_path)


def test_ray_by_ray_start(listener: socket.socket, tmp_path: Path) -> None:
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    (tmp_path / "ray_current_cluster").write_text(address)
    assert running_ray({}, tmp_path) == f"{address} (started by `ray start`)"


@pytest.mark.parametrize("address", ["127.0.0.1:9", "nonsense", "", "host:"])
def test_a_ray_that_is_gone_does_not_count(address: str, tmp_path: Path) -> None:
    (tmp_path / "ray_current_cluster").write_text(address)
    assert running_ray({}, tmp_path) is None


def test_a_noted_ray_must_answer(listener: socket.socket, tmp_path: Path) -> None:
    check_noted_ray({}, tmp_path)
    note = tmp_path / "ray_current_cluster"
    note.write_text(f"127.0.0.1:{listener.getsockname()[1]}")
    check_noted_ray({}, tmp_path)
    note.write_text("127.0.0.1:1")
    check_noted_ray({"RAY_ADDRESS": "10.0.0.1:6379"}, tmp_path)
    with pytest.raises(StartupFailed, match=r"ray_current_cluster \(127\.0\.0\.1:1\) does not answer"):
        check_noted_ray({}, tmp_path)
