"""Device and memory questions, against made-up /proc and cgroup trees."""

import subprocess
import sys
from pathlib import Path

import pytest

from workers.device import check_gpu, default_dtype, free_memory, take_gpu, threads_per_rank, usable_cpus
from workers.errors import WorkerError

GIB = 2**30


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A host with 8 GiB available, whose CPU has no bfloat16, seen from the root of a version-2 cgroup."""
    folder = tmp_path / "proc"
    (folder / "self").mkdir(parents=True)
    (folder / "meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable:   {8 * GIB // 1024} kB\n")
    (folder / "cpuinfo").write_text("processor : 0\nflags\t\t: fpu avx2 avx512f\n")
    (folder / "self" / "cgroup").write_text("0::/\n")
    return folder


@pytest.fixture
def cgroup(tmp_path: Path) -> Path:
    folder = tmp_path / "cgroup"
    folder.mkdir()
    return folder


def write_files(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def test_bfloat16_only_where_the_cpu_multiplies_it(proc: Path) -> None:
    assert default_dtype("cpu", proc=proc) == "float32"
    for flag in ("avx512_bf16", "amx_bf16"):
        (proc / "cpuinfo").write_text(f"flags : fpu {flag} avx2\n")
        assert default_dtype("cpu", proc=proc) == "bfloat16"


def test_an_unreadable_cpuinfo_means_float32(tmp_path: Path) -> None:
    assert default_dtype("cpu", proc=tmp_path) == "float32"


def test_cuda_means_bfloat16(proc: Path) -> None:
    assert default_dtype("cuda", proc=proc) == "bfloat16"


def test_a_rank_sees_the_gpu_it_was_given_and_no_other() -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}  # as it is where Ray is told to leave it alone
    take_gpu([2], environment)
    assert environment == {"CUDA_VISIBLE_DEVICES": "2"}
    take_gpu(["GPU-5a1f"], environment)
    assert environment == {"CUDA_VISIBLE_DEVICES": "GPU-5a1f"}


@pytest.mark.parametrize("assigned", [[], [0, 1]])
def test_a_rank_takes_one_gpu(assigned: list[int]) -> None:
    with pytest.raises(WorkerError, match=f"computes on one GPU; it was given {len(assigned)}"):
        take_gpu(assigned, {})


def test_a_process_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    check_gpu("cpu")
    with pytest.raises(WorkerError, match=r"device cuda: torch .* sees no GPU .* CUDA_VISIBLE_DEVICES is ''"):
        check_gpu("cuda")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    check_gpu("cuda")


def test_free_memory_without_a_limit_is_the_hosts(proc: Path, cgroup: Path) -> None:
    write_files(cgroup, memory__max="max", memory__current=str(3 * GIB))
    assert free_memory("cpu", proc=proc, cgroup=cgroup) == 8 * GIB


def test_free_memory_in_a_container_is_what_its_limit_leaves(proc: Path, cgroup: Path) -> None:
    write_files(
        cgroup,
        memory__max=str(4 * GIB),
        memory__current=str(3 * GIB),
        memory__stat=f"anon 17\ninactive_file {GIB // 2}\nactive_file 99",
    )
    assert free_memory("cpu", proc=proc, cgroup=cgroup) == GIB + GIB // 2


def test_every_group_above_counts(proc: Path, cgroup: Path) -> None:
    (proc / "self" / "cgroup").write_text("0::/kube/pod/app\n")
    write_files(cgroup / "kube" / "pod" / "app", memory__max="max", memory__current="0")
    write_files(cgroup / "kube" / "pod", memory__max=str(2 * GIB), memory__current=str(GIB))
    write_files(cgroup / "kube", memory__max=str(5 * GIB), memory__current=str(GIB))
    assert free_memory("cpu", proc=proc, cgroup=cgroup) == GIB


def test_a_version_1_cgroup(proc: Path, cgroup: Path) -> None:
    (proc / "self" / "cgroup").write_text("11:memory:/job\n4:cpu,cpuacct:/job\n")
    write_files(
        cgroup / "memory" / "job",
        memory__limit_in_bytes=str(2 * GIB),
        memory__usage_in_bytes=str(GIB),
        memory__stat="total_inactive_file 1024",
    )
    assert free_memory("cpu", proc=proc, cgroup=cgroup) == GIB + 1024


def test_a_group_over_its_limit_has_nothing_free(proc: Path, cgroup: Path) -> None:
    write_files(cgroup, memory__max=str(GIB), memory__current=str(2 * GIB))
    assert free_memory("cpu", proc=proc, cgroup=cgroup) == 0


def test_a_meminfo_without_the_number_is_said(proc: Path, cgroup: Path) -> None:
    (proc / "meminfo").write_text("MemTotal: 1 kB\n")
    with pytest.raises(WorkerError, match="MemAvailable"):
        free_memory("cpu", proc=proc, cgroup=cgroup)


def test_a_cpu_quota_cuts_the_affinity(proc: Path, cgroup: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    assert usable_cpus(proc=proc, cgroup=cgroup) == 8
    write_files(cgroup, cpu__max="max 100000")
    assert usable_cpus(proc=proc, cgroup=cgroup) == 8
    write_files(cgroup, cpu__max="250000 100000")
    assert usable_cpus(proc=proc, cgroup=cgroup) == 2
    write_files(cgroup, cpu__max="50000 100000")
    assert usable_cpus(proc=proc, cgroup=cgroup) == 1


def test_a_version_1_cpu_quota(proc: Path, cgroup: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    (proc / "self" / "cgroup").write_text("4:cpu,cpuacct:/job\n")
    write_files(cgroup / "cpu" / "job", cpu__cfs_quota_us="300000", cpu__cfs_period_us="100000")
    assert usable_cpus(proc=proc, cgroup=cgroup) == 3
    write_files(cgroup / "cpu" / "job", cpu__cfs_quota_us="-1")
    assert usable_cpus(proc=proc, cgroup=cgroup) == 8


def test_ranks_share_the_cpus_and_each_gets_one() -> None:
    assert [threads_per_rank(ranks, cpus=8) for ranks in (1, 2, 3, 8, 20)] == [8, 4, 2, 1, 1]
    with pytest.raises(WorkerError, match="0"):
        threads_per_rank(0)


def test_the_module_loads_no_torch() -> None:
    code = "import sys, workers.device; workers.device.default_dtype('cpu'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=200, check=False).returncode == 0
