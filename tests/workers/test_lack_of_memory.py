"""Out of memory for real, in processes that are allowed little: one error, for what and how much there is."""

import errno
import resource
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.fakes.checkpoints import write_counter_model, write_hollow_llama
from tests.fakes.worker_configs import tiny_worker_config
from tests.workers.processes import spawn_ranks
from workers.errors import GroupBroken, OutOfMemory
from workers.lack_of_memory import memory_for
from workers.worker import Worker

MIB = 2**20
CONFIG = tiny_worker_config()


def allow(more: int) -> None:
    """This process may have so many bytes beside those that it has."""
    lines = Path("/proc/self/status").read_text().splitlines()
    has = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, (has + more, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def load_with_little(_: int, connection: Connection, folder: Path) -> None:
    worker = Worker(0, replace(CONFIG, model_path=str(folder)))
    worker.join_group(worker.open_group(True))
    allow(64 * MIB)
    try:
        worker.load()
    except OutOfMemory as error:
        connection.send(str(error))


def allocate_with_little(_: int, connection: Connection, folder: Path) -> None:
    worker = Worker(0, replace(CONFIG, model_path=str(folder)))
    worker.join_group(worker.open_group(True))
    report = worker.load()
    allow(64 * MIB)
    try:
        worker.allocate(256 * MIB // report.bytes_per_block)
    except OutOfMemory as error:
        connection.send(str(error))


def test_a_shard_that_does_not_fit_is_named(tmp_path: Path) -> None:
    folder = write_hollow_llama(tmp_path / "model", vocab_size=2**20)
    with spawn_ranks(load_with_little, 1, folder) as [rank]:
        said = rank.receive()
    assert said.startswith("no memory for its shard of the weights: "), said
    assert "allocate memory" in said
    assert "bytes are free on cpu, " in said
    assert "bytes are allowed to the process (ulimit -d)" in said


def test_a_kv_cache_that_does_not_fit_is_named(tmp_path: Path) -> None:
    with spawn_ranks(allocate_with_little, 1, write_counter_model(tmp_path / "model")) as [rank]:
        said = rank.receive()
    assert said.startswith("no memory for "), said
    assert "KV blocks" in said
    assert "ulimit -d" in said


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory\nframe #0"),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("std::bad_alloc"),
    ],
)
def test_whoever_says_so(error: Exception) -> None:
    said = r"^no memory for a test: [^\n]+; \d+ bytes are free on cpu"
    with pytest.raises(OutOfMemory, match=said) as raised, memory_for("a test", "cpu"):
        raise error
    assert raised.value.__cause__ is error


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left"), RuntimeError("a bug"), GroupBroken("a peer")]
)
def test_other_errors_pass(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, memory_for("a test", "cpu"):
        raise error
    assert raised.value is error
