"""Files that belong to a process: private, named for their owner, reclaimed once it is dead."""

import fcntl
import os
import stat
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tests.workers.processes import spawn_ranks
from workers.ownership import Owned, is_held, reclaim


def hold_both(_: int, connection: Connection, parent: Path) -> None:
    folder, file = Owned.folder(parent, "held"), Owned.file(parent, "held")
    (folder.path / "inside").touch()
    connection.send((folder.path, file.path))
    connection.recv()


def test_names_carry_boot_and_owner(tmp_path: Path) -> None:
    owned = Owned.folder(tmp_path, "steps")
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    assert owned.path.name.startswith(f"shardserve-steps-{boot}-{os.getpid()}-")
    owned.close()


@pytest.mark.parametrize(("make", "mode"), [(Owned.folder, 0o700), (Owned.file, 0o600)])
def test_only_the_user_gets_in(tmp_path: Path, make: object, mode: int) -> None:
    owned = make(tmp_path, "steps")  # type: ignore[operator]
    assert stat.S_IMODE(owned.path.stat().st_mode) == mode
    owned.close()


def test_close_removes_with_content_and_may_be_repeated(tmp_path: Path) -> None:
    owned = Owned.folder(tmp_path, "steps")
    (owned.path / "socket").touch()
    owned.close()
    owned.close()
    assert list(tmp_path.iterdir()) == []


def test_what_a_living_process_holds_stays_and_what_a_dead_one_held_goes(tmp_path: Path) -> None:
    other_kind = tmp_path / "shardserve-other-1"
    strangers = tmp_path / "steps"
    other_kind.touch()
    strangers.touch()
    with spawn_ranks(hold_both, 1, tmp_path) as [owner]:
        held = set(owner.receive())
        assert reclaim(tmp_path, "held") == []
        assert all(path.exists() for path in held)
        owner.kill()
        assert set(reclaim(tmp_path, "held")) == held
    assert set(tmp_path.iterdir()) == {other_kind, strangers}


@pytest.mark.parametrize("make", [Owned.folder, Owned.file])
def test_nobody_takes_what_is_being_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any) -> None:
    """Those who look come at the worst moments: before it is locked, and before it has its name."""
    seen: list[object] = []
    lock = fcntl.flock

    def looked_at(fd: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        seen.extend([is_held(tmp_path, "held"), reclaim(tmp_path, "held")])
        lock(fd, how)
        seen.extend([is_held(tmp_path, "held"), reclaim(tmp_path, "held")])

    monkeypatch.setattr(fcntl, "flock", looked_at)
    owned = make(tmp_path, "held")
    assert seen == [False, [], False, []]
    assert list(tmp_path.iterdir()) == [owned.path]
    assert is_held(tmp_path, "held")
    assert reclaim(tmp_path, "held") == []
    owned.close()


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir])
def test_what_was_never_locked_goes_when_it_is_old(tmp_path: Path, make: Any) -> None:
    hidden = tmp_path / ".shardserve-held-0-1-0"
    make(hidden)
    assert reclaim(tmp_path, "held") == []
    os.utime(hidden, (0, 0))
    assert reclaim(tmp_path, "held") == [hidden]
    assert list(tmp_path.iterdir()) == []


def test_two_that_look_are_no_owners(tmp_path: Path) -> None:
    path = tmp_path / "shardserve-held-0-1-0"
    path.touch()
    with path.open() as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        assert not is_held(tmp_path, "held")


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.touch()
    (tmp_path / "shardserve-steps-link").symlink_to(target)
    assert reclaim(tmp_path, "steps") == []
    assert target.exists()
