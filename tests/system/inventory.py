"""What a running cluster holds, by kind of process: taken before and after, so that what leaks shows.

Knows /proc, /dev/shm and Ray's tables; knows nothing of who kills what.
"""

import os
import re
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.system.processes import descendants, shared_files

_COMES_AND_GOES = ("IDLE", "SpareActor")  # workers that Ray keeps ready; the spare, started when all is quiet
_KEEPS_FILES_OPEN = ("log_monitor.py",)  # Ray's: the logs of processes that have ended, up to 200
_SPARE_DESCRIPTORS = 12  # connections of a process that Ray opens or closes as it likes
_SPARE_PORTS = 4
_SPARE_ACTORS = 1  # the spare
_MEMORY_SHARE = 0.25  # by which a kind may be larger afterwards,
_MEMORY_MIB = 64  # and by this besides
_LISTENING = "0A"


@dataclass(frozen=True, slots=True)
class Inventory:
    """Counts by kind of process, or by what they count."""

    processes: Counter[str]
    descriptors: Counter[str]
    memory_mib: Counter[str]  # anonymous and resident
    listening_ports: int
    files: Counter[str]  # ours or nobody's, in /dev/shm and among our folders for sockets
    actors: int
    placement_groups: int
    free_blocks: int

    @classmethod
    def take(cls, free_blocks: int) -> "Inventory":
        """Of this process and all below it, and of the Ray it is connected to."""
        tree = {os.getpid(): "pytest", **descendants()}
        processes: Counter[str] = Counter()
        descriptors: Counter[str] = Counter()
        memory: Counter[str] = Counter()
        sockets: set[str] = set()
        for pid, title in tree.items():
            kind = kind_of(title)
            targets = list(_descriptors(pid))
            sockets.update(target for target in targets if target.startswith("socket:"))
            if kind not in _COMES_AND_GOES:
                processes[kind] += 1
                descriptors[kind] += 0 if kind in _KEEPS_FILES_OPEN else len(targets)
                memory[kind] += _anonymous_mib(pid)
        actors, groups = _ray_tables()
        ports = sum(f"socket:[{inode}]" in sockets for inode in _listening_inodes())
        files = Counter(of for name in shared_files() if (of := _file_kind(name, tree)) is not None)
        return cls(processes, descriptors, memory, ports, files, actors, groups, free_blocks)

    def leaks_since(self, before: "Inventory") -> list[str]:
        """What there is more of than before, in words; fewer free blocks, too."""
        leaks = [
            *_more("processes", before.processes, self.processes),
            *_more("descriptors", before.descriptors, self.descriptors, _SPARE_DESCRIPTORS),
            *_more("files", before.files, self.files),
        ]
        for kind, mib in self.memory_mib.items():
            if mib > before.memory_mib[kind] * (1 + _MEMORY_SHARE) + _MEMORY_MIB:
                leaks.append(f"memory of {kind}: {before.memory_mib[kind]} -> {mib} MiB")
        for name, spare in (("listening_ports", _SPARE_PORTS), ("actors", _SPARE_ACTORS), ("placement_groups", 0)):
            was, now = getattr(before, name), getattr(self, name)
            if now > was + spare:
                leaks.append(f"{name}: {was} -> {now}")
        if self.free_blocks < before.free_blocks:
            leaks.append(f"free blocks: {before.free_blocks} -> {self.free_blocks}")
        return leaks

    def table_since(self, before: "Inventory") -> list[str]:
        """Every count, before and after, a line each."""
        rows = []
        for name in ("processes", "descriptors", "memory_mib", "files"):
            was, now = getattr(before, name), getattr(self, name)
            rows += [(f"{name} of {kind}", was[kind], now[kind]) for kind in sorted(was | now)]
        for name in ("listening_ports", "actors", "placement_groups", "free_blocks"):
            rows.append((name, getattr(before, name), getattr(self, name)))
        width = max(len(name) for name, _, _ in rows)
        return [f"{name:<{width}} {was:>7} {now:>7}" for name, was, now in rows]


def kind_of(title: str) -> str:
    """`ray::ServeReplica:app:Driver.method` -> `ServeReplica:app:Driver`, `python x/y.py -u` -> `y.py`."""
    if title.startswith("ray::"):
        match = re.match(r"ray::(\w+(?::[\w-]+)*)", title)
        return match[1] if match else title
    program, *arguments = title.split() or ["ended"]
    scripts = (
        [word for word in arguments if word.endswith(".py")] if Path(program).name.startswith("python") else []
    )
    return Path((scripts or [program])[0]).name


def _more(name: str, before: Counter[str], now: Counter[str], spare: int = 0) -> Iterator[str]:
    for kind, count in now.items():
        if count > before[kind] + spare:
            yield f"{name} of {kind}: {before[kind]} -> {count}"


def _descriptors(pid: int) -> Iterator[str]:
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            yield os.readlink(entry)
    except OSError:  # it has ended
        return


def _anonymous_mib(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) // 1024 for line in lines if line.startswith("RssAnon:")), 0)


def _listening_inodes() -> Iterator[str]:
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENING:
                yield fields[9]


def _file_kind(name: str, tree: Collection[int]) -> str | None:
    """Of a file whose name tells that a process of ours made it, or one that has ended; None of any other."""
    match = re.search(r"/shardserve-(\w+)-\w+-(\d+)-\w+$", name)
    if match is None:
        return None
    maker = int(match[2])
    if maker in tree:
        return match[1]
    return None if Path(f"/proc/{maker}").exists() else f"{match[1]} of a process that has ended"


def _ray_tables() -> tuple[int, int]:
    """Actors that live or are to live, and placement groups that are not removed."""
    import ray
    from ray.util.placement_group import placement_group_table

    actors = ray._private.state.actors().values()
    groups = placement_group_table().values()
    return sum(actor["State"] != "DEAD" for actor in actors), sum(group["state"] != "REMOVED" for group in groups)
