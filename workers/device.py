"""What this machine offers a rank: which device and dtype "auto" means, free memory, CPUs.

Reads /proc and the cgroup, so that a container's limits count and not the host's. Importing it loads no torch,
since the control plane asks it too; the few functions that need torch load it when they are called.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from workers.config import Device, Dtype
from workers.errors import WorkerError

if TYPE_CHECKING:
    import torch

_BF16_CPU_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})
_CGROUP = Path("/sys/fs/cgroup")
_PROC = Path("/proc")


def default_dtype(device: Device, *, proc: Path = _PROC) -> Dtype:
    """bfloat16 where the hardware multiplies it, float32 on CPUs that would emulate it (several times slower)."""
    if device == "cuda":
        return "bfloat16"
    return "bfloat16" if _BF16_CPU_FLAGS & _cpu_flags(proc) else "float32"


def torch_dtype(dtype: Dtype) -> torch.dtype:
    """The torch dtype of a configured name."""
    import torch

    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]


def visible_gpus() -> int:
    """How many GPUs this process may use."""
    import torch

    return torch.cuda.device_count()


def check_gpu(device: Device) -> None:
    """Raises `WorkerError` when this process is to compute on a GPU and sees none."""
    if device == "cuda" and visible_gpus() == 0:
        import torch

        raise WorkerError(
            f"device cuda: torch {torch.__version__} (CUDA {torch.version.cuda}) sees no GPU in process "
            f"{os.getpid()}; CUDA_VISIBLE_DEVICES is {os.environ.get('CUDA_VISIBLE_DEVICES')!r}"
        )


def take_gpu(assigned: Sequence[object], environment: MutableMapping[str, str]) -> None:
    """Show this process the one GPU that it was given, which is then cuda:0 to it, and no other.

    Before torch looks for GPUs. Ray does the same unless it is told not to, and then ranks would share a GPU.
    Raises `WorkerError` for another number of GPUs than one.
    """
    if len(assigned) != 1:
        raise WorkerError(f"a rank on device cuda computes on one GPU; it was given {len(assigned)}")
    environment["CUDA_VISIBLE_DEVICES"] = str(assigned[0])


def free_memory(device: Device, *, proc: Path = _PROC, cgroup: Path = _CGROUP) -> int:
    """Bytes that can still be allocated: what the GPU has free, or the least of the host and every cgroup."""
    if device == "cuda":
        import torch

        torch.cuda.empty_cache()  # what torch keeps of memory that was given back counts as free
        return int(torch.cuda.mem_get_info()[0])
    return min([_available_on_host(proc), *_available_in_cgroups(proc, cgroup)])


def usable_cpus(*, proc: Path = _PROC, cgroup: Path = _CGROUP) -> int:
    """CPUs this process may keep busy: its affinity, cut by the cgroup's quota; at least 1."""
    cpus = len(os.sched_getaffinity(0))
    for folder in _cgroup_folders(proc, cgroup, "cpu"):
        quota = _cpu_quota(folder)
        if quota is not None:
            cpus = min(cpus, int(quota))
    return max(1, cpus)


def threads_per_rank(ranks_on_host: int, *, cpus: int | None = None) -> int:
    """Intra-op threads for each CPU rank of a host: more threads than cores make all of them slow."""
    if ranks_on_host < 1:
        raise WorkerError(f"ranks_on_host must be at least 1, not {ranks_on_host}")
    return max(1, (usable_cpus() if cpus is None else cpus) // ranks_on_host)


def set_threads(count: int) -> None:
    """Use `count` intra-op threads in this process. Before the first parallel operation of torch."""
    import torch

    torch.set_num_threads(count)


def _cpu_flags(proc: Path) -> frozenset[str]:
    try:
        lines = (proc / "cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def _available_on_host(proc: Path) -> int:
    for line in (proc / "meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise WorkerError(f"{proc / 'meminfo'} does not say MemAvailable")


def _available_in_cgroups(proc: Path, cgroup: Path) -> Iterator[int]:
    """What every limit above this process leaves. Cached files count as free: the kernel drops them first."""
    for folder in _cgroup_folders(proc, cgroup, "memory"):
        for limit_name, usage_name, cache_name in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, usage = _read_int(folder / limit_name), _read_int(folder / usage_name)
            if limit is not None and usage is not None:
                yield max(0, limit - usage + _read_stat(folder / "memory.stat", cache_name))


def _cgroup_folders(proc: Path, cgroup: Path, controller: str) -> Iterator[Path]:
    """This process's group and all above it, in both versions. A container may see its own as the root."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = cgroup / controller if controllers else cgroup
        folder = root / path.lstrip("/")
        folders = [folder, *folder.parents]
        yield from folders[: folders.index(root) + 1] if root in folders else [root]


def _cpu_quota(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        quota, period = str(_read_int(folder / "cpu.cfs_quota_us")), str(_read_int(folder / "cpu.cfs_period_us"))
    if not (quota.isdigit() and period.isdigit()):  # "max", -1 or no such file: no limit
        return None
    return int(quota) / int(period)


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _read_stat(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), 0)
