"""The folder of a launch: its life, and what the next launch does with an abandoned one."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster.launch.run_folder import RunFolder, default_parent, reclaim_abandoned

# Takes a folder, starts a process that writes there, says both and waits.
_LAUNCHER = """
import subprocess, sys, time
from pathlib import Path
from cluster.launch.run_folder import RunFolder
folder = RunFolder.take(Path(sys.argv[1]))
log = open(folder.path / "daemon.log", "w")
daemon = subprocess.Popen(["sleep", "60"], stdout=log, start_new_session=True)
print(folder.path, daemon.pid, flush=True)
time.sleep(60)
"""


def test_a_folder_is_private_and_gone_after_close(tmp_path: Path) -> None:
    folder = RunFolder.take(tmp_path)
    assert folder.path.stat().st_mode & 0o777 == 0o700
    (folder.path / "session").mkdir()
    (folder.path / "session" / "socket").touch()
    assert folder.close(grace_s=0) == []
    assert list(tmp_path.iterdir()) == []
    assert folder.close(grace_s=0) == []


def test_a_live_launchers_folder_is_not_reclaimed(tmp_path: Path) -> None:
    folder = RunFolder.take(tmp_path)
    assert reclaim_abandoned(tmp_path) == []
    assert folder.path.is_dir()
    folder.close(grace_s=0)


def test_what_a_killed_launcher_leaves_is_ended_and_removed(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _LAUNCHER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        path, daemon = owner.stdout.readline().split()
        assert reclaim_abandoned(tmp_path) == []
        owner.send_signal(signal.SIGKILL)
        owner.wait(60)
    assert reclaim_abandoned(tmp_path) == [Path(path)]
    assert list(tmp_path.iterdir()) == []
    assert not Path("/proc", daemon).exists() or Path("/proc", daemon, "stat").read_text().split()[2] == "Z"


def test_a_folder_without_owner_is_reclaimed_only_when_it_is_old(tmp_path: Path) -> None:
    path = tmp_path / "shardserve-run-12345678"
    path.mkdir()
    assert reclaim_abandoned(tmp_path) == []
    long_ago = time.time() - 3600
    os.utime(path, (long_ago, long_ago))
    assert reclaim_abandoned(tmp_path) == [path]


def test_other_folders_are_not_touched(tmp_path: Path) -> None:
    other = tmp_path / "shardserve-running"
    other.mkdir()
    os.utime(other, (0, 0))
    assert reclaim_abandoned(tmp_path) == []
    assert other.is_dir()


@pytest.mark.parametrize(
    ("temporary", "chosen"), [("/tmp", "/tmp"), ("/var/tmp", "/var/tmp"), (f"/{'x' * 40}", "/tmp")]
)
def test_socket_paths_stay_short(temporary: str, chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: temporary)
    assert str(default_parent()) == chosen
    session = "session_2026-11-30_06-14-12_965158_4194304/sockets/plasma_store"
    assert len(f"{default_parent()}/shardserve-run-12345678/ray/{session}") <= 107
