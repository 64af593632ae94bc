"""What serving costs around the ranks: Serve's own proxy against HAProxy, in turn, under the same load.

    python -m benchmarks.serving [MODEL] [--tp N] [--concurrency 1,32] [--rounds 2]

Starts `shardserve serve` anew for each round and proxy. Prints output tok/s, the median and 99th percentile of the
gap between chunks, the CPU milliseconds that each kind of process took for one chunk, and at the end of each round
the resident memory of each kind. Nothing else should run on the machine.
"""

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from cluster.bench.load import BenchPlan, measure
from cluster.bench.summary import LevelSummary

PROXIES = ("serve", "haproxy")
KINDS = {  # the start of a process's title -> what it is; the first that fits
    "ray::WorkerActor": "ranks",
    "ray::ServeReplica:shardserve:Driver": "driver",
    "ray::ServeReplica:shardserve:Ingress": "ingress",
    "ray::ProxyActor": "proxy",
    "ray::HAProxy": "proxy",
    "ray::ServeController": "controller",
}
START_DEADLINE_S = 180.0
STOP_DEADLINE_S = 60.0
SETTLE_S = 15.0  # Ray goes on starting spare processes after it is ready
MARK = "SHARDSERVE_BENCHMARK"
TICKS_S = 1 / os.sysconf("SC_CLK_TCK")


@contextmanager
def server(model: str, tp: int, port: int, proxy: str) -> Iterator[str]:
    """A server of its own; what is yielded marks the environment of all its processes."""
    mark = f"{MARK}={uuid.uuid4().hex}"
    environment = os.environ | dict([mark.split("=")])
    command = [sys.executable, "-m", "cluster.cli", "serve", model, "--tp", str(tp), "--port", str(port)]
    with subprocess.Popen([*command, "--proxy", proxy], env=environment, stdout=subprocess.DEVNULL) as process:
        try:
            wait_until_healthy(f"http://127.0.0.1:{port}/health", process)
            yield mark
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(STOP_DEADLINE_S)


def wait_until_healthy(url: str, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + START_DEADLINE_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            if httpx.get(url, timeout=2.0, trust_env=False).status_code == httpx.codes.OK:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise SystemExit(f"the server did not become healthy within {START_DEADLINE_S:g} s")


def processes(mark: str) -> Iterator[tuple[Path, str]]:
    """/proc folder and kind of every process of that server."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() not in (folder / "environ").read_bytes().split(b"\0"):
                continue
            title = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # ended meanwhile, or not ours
            continue
        name = Path(title.split(" ", 1)[0]).name
        found = next((kind for start, kind in KINDS.items() if title.startswith(start)), None)
        yield folder, found or ("proxy" if name == "haproxy" else "launcher" if "cluster.cli" in title else "ray")


def cpu_seconds(mark: str) -> dict[str, float]:
    """User and system time so far, by kind."""
    total: dict[str, float] = defaultdict(float)
    for folder, kind in processes(mark):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total[kind] += (int(fields[11]) + int(fields[12])) * TICKS_S
    return total


def memory_mb(mark: str) -> dict[str, list[int]]:
    """Resident megabytes of each process, by kind, largest first. Shared pages count in each."""
    found: dict[str, list[int]] = {}
    for folder, kind in processes(mark):
        try:
            pages = int((folder / "statm").read_text().split()[1])
        except OSError:
            continue
        found.setdefault(kind, []).append(pages * os.sysconf("SC_PAGE_SIZE") // 2**20)
    return {kind: sorted(sizes, reverse=True) for kind, sizes in sorted(found.items())}


def loaded(plan: BenchPlan, mark: str) -> Iterator[tuple[LevelSummary, dict[str, float]]]:
    """Each level's figures, and the CPU milliseconds for one of its chunks, by kind."""
    for concurrency in plan.concurrency:
        level_plan = BenchPlan(url=plan.url, concurrency=(concurrency,), seed=plan.seed + concurrency)
        before = cpu_seconds(mark)
        level = asyncio.run(only_level(level_plan))
        spent = cpu_seconds(mark)
        chunks = max(1, level.output_tokens)  # one a token, but where a client is behind
        yield level, {kind: 1e3 * (spent[kind] - before[kind]) / chunks for kind in sorted(spent)}


async def only_level(plan: BenchPlan) -> LevelSummary:
    levels = [level async for _, level in measure(plan)]
    return levels[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--concurrency", default="1,32")
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    concurrency = tuple(int(level) for level in arguments.concurrency.split(","))
    for number in range(arguments.rounds):
        for proxy in PROXIES:
            print(f"round {number + 1}, {proxy}: starting", flush=True)
            plan = BenchPlan(url=f"http://127.0.0.1:{arguments.port}", concurrency=concurrency, seed=1000 * number)
            with server(arguments.model, arguments.tp, arguments.port, proxy) as mark:
                time.sleep(SETTLE_S)
                for level, cost in loaded(plan, mark):
                    gap = level.itl_ms
                    print(
                        f"{proxy:>8}, {level.load:>10}: {level.output_tokens_per_s:6.1f} tok/s, gap "
                        f"{gap.median or 0:.1f} ms, p99 {gap.p99 or 0:.1f}; CPU ms a chunk: "
                        + ", ".join(f"{kind} {value:.2f}" for kind, value in cost.items()),
                        flush=True,
                    )
                print("     MB:", ", ".join(f"{kind} {sizes}" for kind, sizes in memory_mb(mark).items()))


if __name__ == "__main__":
    main()
