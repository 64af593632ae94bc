"""The library is compiled once for a machine, and whatever can go wrong is a reason and no crash."""

import logging
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from model_shards.cpu_kernels import build
from model_shards.cpu_kernels.build import SOURCE, BuildRefused, built_library, find_compiler
from model_shards.cpu_kernels.load import cpu_kernels


def program(path: Path, script: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


COMPILES = 'echo called >>"$(dirname "$0")/calls"; while [ "$1" != -o ]; do shift; done; echo library >"$2"'


@pytest.fixture
def compiler(tmp_path: Path) -> str:
    """Writes its calls down and makes something."""
    return program(tmp_path / "bin" / "cc", COMPILES)


def calls(compiler: str) -> int:
    return len((Path(compiler).parent / "calls").read_text().splitlines())


def test_a_library_is_compiled_once(tmp_path: Path, compiler: str) -> None:
    folder = tmp_path / "cache" / "kernels"
    library = built_library(folder, compiler)
    assert library.read_text() == "library\n"
    assert built_library(folder, compiler) == library
    assert calls(compiler) == 1
    assert list(folder.iterdir()) == [library]
    assert stat.S_IMODE(folder.stat().st_mode) & 0o077 == 0


def test_another_source_cpu_or_compiler_has_a_library_of_its_own(tmp_path: Path, compiler: str) -> None:
    folder, source, cpuinfo = tmp_path / "cache", tmp_path / "source.c", tmp_path / "cpuinfo"
    source.write_text("one")
    cpuinfo.write_text("processor: 0\nflags: avx2\ncpu MHz: 2000\n\nprocessor: 1\n")
    libraries = {built_library(folder, compiler, source=source, cpuinfo=cpuinfo)}
    source.write_text("two")
    libraries.add(built_library(folder, compiler, source=source, cpuinfo=cpuinfo))
    cpuinfo.write_text("processor: 0\nflags: avx2 avx512f\ncpu MHz: 2000\n\nprocessor: 1\n")
    libraries.add(built_library(folder, compiler, source=source, cpuinfo=cpuinfo))
    program(Path(compiler), f": other\n{COMPILES}")
    libraries.add(built_library(folder, compiler, source=source, cpuinfo=cpuinfo))
    cpuinfo.write_text("processor: 0\nflags: avx2 avx512f\ncpu MHz: 3100\n\nprocessor: 1\n")  # the same CPU
    libraries.add(built_library(folder, compiler, source=source, cpuinfo=cpuinfo))
    assert len(libraries) == calls(compiler) == 4


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo first >&2; echo second >&2; exit 3", r"failed \(3\): first \| second"),
        ("exit 0", "ended well and made nothing"),
    ],
)
def test_a_compiler_that_fails_is_a_reason(tmp_path: Path, script: str, words: str) -> None:
    folder = tmp_path / "cache"
    with pytest.raises(BuildRefused, match=words):
        built_library(folder, program(tmp_path / "cc", script))
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("left", [0, 1, 7])
def test_a_damaged_library_is_made_anew(tmp_path: Path, compiler: str, left: int) -> None:
    """To load one that is cut short may end the process by SIGBUS."""
    library = built_library(tmp_path / "cache", compiler)
    os.truncate(library, left)
    assert built_library(tmp_path / "cache", compiler) == library
    assert library.read_text() == "library\n"
    assert calls(compiler) == 2


def test_a_compiler_that_hangs_is_ended_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_DEADLINE_S", 0.5)
    child = tmp_path / "child"
    with pytest.raises(BuildRefused, match=r"did not end within 0\.5 s"):
        built_library(tmp_path / "cache", program(tmp_path / "cc", f"sleep 600 & echo $! >{child}; wait"))
    pid = int(child.read_text())
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_folder_that_cannot_be_made_is_a_reason(tmp_path: Path, compiler: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BuildRefused, match="no library can be kept in"):
        built_library(tmp_path / "file" / "folder", compiler)


def test_what_a_killed_builder_left_is_cleared_away(tmp_path: Path, compiler: str) -> None:
    old, new = tmp_path / ".build-old", tmp_path / ".build-new"
    for scratch in (old, new):
        scratch.mkdir()
        (scratch / "half.so").touch()
    os.utime(old, (0, 0))
    built_library(tmp_path, compiler)
    assert not old.exists()
    assert new.exists()


def test_which_compiler(tmp_path: Path, compiler: str) -> None:
    path = {"PATH": str(tmp_path / "bin")}
    assert find_compiler(path) == compiler
    assert find_compiler({"PATH": "", "SHARDSERVE_CC": compiler}) == compiler
    with pytest.raises(BuildRefused, match=r"no C compiler \(cc, gcc or clang\)"):
        find_compiler({"PATH": str(tmp_path)})
    with pytest.raises(BuildRefused, match="SHARDSERVE_CC=icc is no program"):
        find_compiler({**path, "SHARDSERVE_CC": "icc"})
    with pytest.raises(BuildRefused, match="SHARDSERVE_CC is none"):
        find_compiler({**path, "SHARDSERVE_CC": "none"})


@pytest.fixture
def real_compiler() -> Iterator[str]:
    """That of this machine; what was loaded before is forgotten, and what a test loads afterwards."""
    cpu_kernels.cache_clear()
    try:
        yield find_compiler(os.environ)
    except BuildRefused as refusal:
        pytest.skip(str(refusal))
    finally:
        cpu_kernels.cache_clear()


def test_a_library_that_cannot_be_loaded_is_said_once_and_torch_computes(
    real_compiler: str,
    tmp_path: Path,
    compiler: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("SHARDSERVE_CC", compiler)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cpu_kernels() is None
    assert cpu_kernels() is None
    assert caplog.text.count("torch's own operations instead of compiled ones") == 1


def test_a_library_without_our_functions_is_not_used(
    real_compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    empty = tmp_path / "empty.c"
    empty.write_text("int nothing;\n")
    script = f'exec {real_compiler} $(echo "$@" | sed "s|{SOURCE}|{empty}|")'
    monkeypatch.setenv("SHARDSERVE_CC", program(tmp_path / "cc", script))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cpu_kernels() is None
    assert "undefined symbol" in caplog.text


def test_a_library_that_computes_something_else_is_not_used(
    real_compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A compiler that takes a constant 0.5 for 0.4."""
    wrong = tmp_path / "wrong.c"
    wrong.write_text(SOURCE.read_text().replace("5.0000001201e-1f", "4.0e-1f"))
    script = f'exec {real_compiler} $(echo "$@" | sed "s|{SOURCE}|{wrong}|")'
    monkeypatch.setenv("SHARDSERVE_CC", program(tmp_path / "cc", script))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cpu_kernels() is None
    assert "silu_and_multiply, as" in caplog.text
    assert "is not right" in caplog.text


def test_the_real_source_compiles_here_where_there_is_a_compiler(
    real_compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cpu_kernels() is not None
    assert f"by {real_compiler}" in caplog.text
    assert list((tmp_path / "shardserve" / "cpu-kernels").glob("*.so"))
