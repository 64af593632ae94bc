"""Makes a shared library of kernels.c for the CPU of this machine, once, in the user's cache folder.

Knows compilers and files; knows nothing of tensors or of what the functions do.
"""

import hashlib
import os
import platform
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

SOURCE = Path(__file__).with_name("kernels.c")
OFF = "none"
VARIABLE = "SHARDSERVE_CC"
_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-shared", "-fPIC")
_DEADLINE_S = 60.0
_SCRATCH = ".build-"
_ABANDONED_S = 2 * _DEADLINE_S
_MOST_LINES = 3  # of what a compiler says


class BuildRefused(Exception):
    """There is no library, and why."""


def find_compiler(environment: Mapping[str, str]) -> str:
    """The C compiler that $SHARDSERVE_CC names, or the first of the usual ones. Raises `BuildRefused`."""
    named = environment.get(VARIABLE)
    if named == OFF:
        raise BuildRefused(f"{VARIABLE} is {OFF}")
    for name in (named,) if named else _COMPILERS:
        found = shutil.which(name, path=environment.get("PATH", os.defpath))
        if found is not None:
            return found
    raise BuildRefused(
        f"{VARIABLE}={named} is no program" if named else "there is no C compiler (cc, gcc or clang)"
    )


def built_library(
    folder: Path, compiler: str, *, source: Path = SOURCE, cpuinfo: Path = Path("/proc/cpuinfo")
) -> Path:
    """The library in `folder`, compiled now unless the same compiler did so for the same CPU and source.

    Its name ends with the hash of its content: to load a file that a power cut or a copy has damaged may end the
    process. Several processes may come here at once: each makes its own file and puts it in place whole. Raises
    `BuildRefused`.
    """
    fingerprint = _fingerprint(compiler, source, cpuinfo)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for library in folder.glob(f"{fingerprint}-*.so"):
            if library.name == _name(fingerprint, library.read_bytes()):  # else the new one takes its place
                return library
        _clear_away(folder)
        with tempfile.TemporaryDirectory(dir=folder, prefix=_SCRATCH) as scratch:
            made = Path(scratch) / "made.so"
            _compile([compiler, *_FLAGS, "-o", str(made), str(source), "-lm"])
            if not made.is_file():
                raise BuildRefused(f"{compiler} ended well and made nothing")
            return made.replace(folder / _name(fingerprint, made.read_bytes()))
    except OSError as error:
        raise BuildRefused(f"no library can be kept in {folder}: {error}") from error


def _clear_away(folder: Path) -> None:
    """What builders that were killed have left."""
    for scratch in folder.glob(f"{_SCRATCH}*"):
        with suppress(OSError):  # its owner lives and has just removed it
            if time.time() - scratch.stat().st_mtime > _ABANDONED_S:
                shutil.rmtree(scratch)


def _compile(command: list[str]) -> None:
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        _, said = process.communicate(timeout=_DEADLINE_S)
    except subprocess.TimeoutExpired:
        raise BuildRefused(f"{command[0]} did not end within {_DEADLINE_S:g} s") from None
    finally:
        if process.returncode is None:  # it has children, which would live on
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode != 0:
        first = " | ".join(said.strip().splitlines()[:_MOST_LINES])
        raise BuildRefused(f"{command[0]} failed ({process.returncode}): {first}")


def _name(fingerprint: str, content: bytes) -> str:
    return f"{fingerprint}-{hashlib.sha256(content).hexdigest()[:32]}.so"


def _fingerprint(compiler: str, source: Path, cpuinfo: Path) -> str:
    """Of all that the machine code depends on: a home folder may be shared by machines that differ."""
    program = Path(compiler).resolve()
    status = program.stat()
    parts = (
        source.read_text(),
        *_FLAGS,
        str(program),
        str(status.st_size),
        str(status.st_mtime_ns),
        _cpu(cpuinfo),
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _cpu(cpuinfo: Path) -> str:
    """What the kernel says of the first CPU: its model and its instruction sets."""
    try:
        about = cpuinfo.read_text().split("\n\n", 1)[0].splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    changing = (
        "cpu MHz",
        "bogomips",
        "BogoMIPS",
        "processor",
        "apicid",
        "initial apicid",
        "core id",
        "physical id",
    )
    return "\n".join(line for line in about if line.partition(":")[0].strip() not in changing)
