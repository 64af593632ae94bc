"""What a worker says of itself in answer to control calls: who it is, and what it loaded.

Plain data that both ends import; knows nothing of torch, Ray or sockets.
"""

import importlib.metadata
import importlib.util
from dataclasses import dataclass

from model_shards.weights.proof import Holding

_PACKAGES = ("cluster", "workers", "model_shards")


@dataclass(frozen=True, slots=True)
class CodeIdentity:
    """Which code a process would run: the installed version and the file behind each of our packages."""

    version: str
    files: tuple[tuple[str, str], ...]  # (package, path of its __init__.py), without importing the package

    @classmethod
    def of_this_process(cls) -> "CodeIdentity":
        files = []
        for package in _PACKAGES:
            spec = importlib.util.find_spec(package)
            files.append((package, str(spec.origin) if spec is not None else "not found"))
        try:
            version = importlib.metadata.version("shardserve")
        except importlib.metadata.PackageNotFoundError:
            version = "not installed"
        return cls(version=version, files=tuple(files))

    def difference(self, other: "CodeIdentity", *, same_node: bool) -> str | None:
        """What makes `other` run other code than this process does, or None.

        Paths are compared on one node only: another node may be installed elsewhere. A folder of the user's with
        one of our names, on the path that Ray gives its workers, is how they come to differ.
        """
        if self.version != other.version:
            return f"it has shardserve {other.version}, the driver {self.version}"
        if same_node:
            for (package, mine), (_, theirs) in zip(self.files, other.files, strict=True):
                if mine != theirs:
                    return (
                        f"its package {package!r} comes from {theirs}, the driver's from {mine}: "
                        f"a folder called {package!r} on the import path shadows ours"
                    )
        return None


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """Where a rank runs and which code it runs."""

    rank: int
    pid: int
    node_id: str  # Ray's id of the node, "" outside Ray
    node_ip: str
    hostname: str
    code: CodeIdentity
    stderr: str = ""  # path of the file that it writes to, "" when that is no file
    import_seconds: float = 0.0  # of its start; nothing for one that had been prepared


@dataclass(frozen=True, slots=True)
class SpareReport:
    """Where a process waits that has imported everything."""

    pid: int
    node_id: str


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What loading the shard took and what it leaves for the KV cache."""

    rank: int
    weight_bytes: int  # of this rank's shard as it was read; a packed copy of a tied head comes on top
    seconds: float
    bytes_per_block: int  # of KV cache, all layers of this rank
    free_memory: int  # bytes, after loading
    holdings: tuple[Holding, ...] = ()  # for the shard proof
    total_memory: int = 0  # bytes of the rank's GPU
    activation_memory: int = 0  # bytes that the largest step takes beside weights and KV cache, measured on a GPU
