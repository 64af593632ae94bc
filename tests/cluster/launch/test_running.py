"""Finding the Ray of a launch from another process: which count, which is taken, when the user has to choose."""

import os
import re
import socket
from pathlib import Path

import pytest

from cluster.errors import StartupFailed, Unavailable
from cluster.launch import ray_node, running
from cluster.launch.run_folder import RunFolder
from cluster.launch.running import RunningRay, choose, join_ray, note_address, running_here

_OURS = RunningRay("10.0.0.1:6379", Path("/tmp/shardserve-run-00000000"))
_KNOWN = "10.0.0.2:6379 (started by `ray start`)"


def test_a_launch_that_lives_and_has_noted_its_address_is_found(tmp_path: Path) -> None:
    folder, starting = RunFolder.take(tmp_path), RunFolder.take(tmp_path)
    note_address(folder.path, "10.0.0.1:6379")
    assert running_here(tmp_path) == [RunningRay("10.0.0.1:6379", folder.path)]
    folder.close(grace_s=0)
    starting.close(grace_s=0)
    assert running_here(tmp_path) == []


def test_a_folder_without_a_live_owner_or_open_to_others_is_not(tmp_path: Path) -> None:
    dead = tmp_path / "shardserve-run-00000000"
    dead.mkdir(mode=0o700)
    (dead / "shardserve-launcher-0-1-0").touch()
    note_address(dead, "10.0.0.1:6379")
    assert running_here(tmp_path) == []
    assert (dead / "shardserve-launcher-0-1-0").exists()
    folder = RunFolder.take(tmp_path)
    note_address(folder.path, "10.0.0.1:6379")
    os.chmod(folder.path, 0o755)
    assert running_here(tmp_path) == []
    folder.close(grace_s=0)


def test_the_only_one_is_taken() -> None:
    assert choose([_OURS], None, {}) == _OURS.address
    assert choose([], _KNOWN, {}) == "auto"
    assert choose([], None, {"RAY_ADDRESS": ""}) == "auto"


def test_ray_address_decides() -> None:
    assert choose([_OURS, _OURS], _KNOWN, {"RAY_ADDRESS": "10.0.0.9:1"}) == "10.0.0.9:1"


@pytest.mark.parametrize(("ours", "known"), [([_OURS, _OURS], None), ([_OURS], _KNOWN)])
def test_of_several_the_caller_chooses(ours: list[RunningRay], known: str | None) -> None:
    with pytest.raises(Unavailable, match=re.escape(_OURS.address) + ".*choose one with address="):
        choose(ours, known, {})


def test_an_address_where_nothing_answers_is_unavailable_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(Unavailable, match=f"nothing answers at '{address}'"):
        join_ray(address)


def test_the_cluster_that_ray_has_noted_may_be_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(environment: object) -> None:
        raise StartupFailed("the Ray cluster noted there does not answer")

    monkeypatch.setattr(running, "running_here", list)
    monkeypatch.setattr(running, "running_ray", lambda environment: None)
    monkeypatch.setattr(ray_node, "check_noted_ray", refuse)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(Unavailable, match="noted there does not answer"):
        join_ray(None)
