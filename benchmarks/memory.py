"""How many bytes each process grows by a request: one-token requests over HTTP, beside an empty Serve application.

    python -m benchmarks.memory [--requests 20000] [--warm-up 25000]

Ours is the counter model on two ranks; the empty one has the same two deployments, of which the first makes one
call to the second for each request and does nothing else. Each is asked over 64 connections that stay open. After
the warm-up the private memory (`RssAnon`) of its processes, Ray's own included, is read twenty times, and a line
is fitted. Allocators take memory in pieces of 64 KB and more, so that fewer than 10,000 requests say little. A
short warm-up counts what is taken once: after 5,000 requests the ranks grew by 9 MB in the next 20,000, after
25,000 by less than 1 MB.

Ends with exit code 1 when a process of ours grows by more than 100 bytes a request above its like.
"""

import argparse
import asyncio
import json
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from ray import serve
from ray.serve.config import HTTPOptions

from cluster.application import build
from cluster.driver import local_ray
from tests.fakes.checkpoints import write_counter_model
from tests.system.processes import descendants

_READINGS = 20
_CONNECTIONS = 64
_MOST_BYTES = 100.0
_LIMIT_S = 120.0  # of one request
_HOST = "127.0.0.1"
_ROLES = {  # a part of a process's title -> what it is
    "ray::ServeReplica:memory:Ingress": "ingress",
    "ray::ServeReplica:memory:Driver": "driver",
    "ray::WorkerActor": "rank",
    "ray::SpareActor": "spare",
    "ray::ProxyActor": "proxy",
    "ray::ServeController": "controller",
    "gcs_server": "gcs",
    "raylet/raylet": "raylet",
    "dashboard/agent": "agent",
    "runtime_env/agent": "agent of environments",
}

Memory = dict[int, int]  # pid -> bytes
Slopes = dict[str, list[float]]  # role -> bytes a request, of each process


class Connection:
    """Kept alive: one request after the other, with as little work for the client as can be."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, port: int) -> "Connection":
        return cls(*await asyncio.open_connection(_HOST, port))

    async def ask(self, number: int) -> None:
        body = json.dumps({"model": "counter", "prompt": f"request {number}", "max_tokens": 1})
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {_HOST}\r\nContent-Type: application/json\r\n"
        self._writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        async with asyncio.timeout(_LIMIT_S):
            answer = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = next(line for line in answer.split("\r\n") if line.startswith("content-length:"))
            content = await self._reader.readexactly(int(length.partition(":")[2]))
        if " 200 " not in answer.split("\r\n")[0]:
            raise SystemExit(f"request {number}: {answer}{content.decode()}")

    def close(self) -> None:
        self._writer.close()


def private_memory() -> Memory:
    """Of every process that this one has started."""
    found = {}
    for pid in descendants():
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            continue
        found[pid] = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)
    return found


async def load(connections: list[Connection], numbers: range) -> None:
    left = iter(numbers)

    async def slot(connection: Connection) -> None:
        for number in left:
            await connection.ask(number)

    async with asyncio.TaskGroup() as slots:
        for connection in connections:
            slots.create_task(slot(connection))


async def measure(name: str, port: int, warm_up: int, count: int) -> Slopes:
    connections = [await Connection.open(port) for _ in range(_CONNECTIONS)]
    ends = [warm_up + count * part // _READINGS for part in range(_READINGS + 1)]
    readings = []
    for start, end in zip([0, *ends], ends, strict=False):
        started = time.monotonic()
        await load(connections, range(start, end))
        readings.append(private_memory())
        rate = (end - start) / (time.monotonic() - started)
        print(f"{name}: {end} of {ends[-1]} requests, {rate:.0f} a second", flush=True)
    for connection in connections:
        connection.close()
    slopes: Slopes = {}
    for pid, title in sorted(descendants().items()):
        role = next((role for part, role in _ROLES.items() if part in title), None)
        if role is not None and all(pid in reading for reading in readings):
            grown = [reading[pid] for reading in readings]
            slopes.setdefault(role, []).append(statistics.linear_regression(ends, grown).slope)
    return slopes


@contextmanager
def served(application: serve.Application) -> Iterator[int]:
    """On a Ray of its own, at the port that this gives."""
    with local_ray.ensure_ray(2):
        port = _free_port()
        serve.start(http_options=HTTPOptions(host=_HOST, port=port))
        serve.run(application, name="memory")
        yield port
        serve.shutdown()


def _free_port() -> int:
    with socket.create_server((_HOST, 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def empty_application() -> serve.Application:
    """The same shape and the same options, and nothing in it."""
    options: dict[str, Any] = {
        "ray_actor_options": {"num_cpus": 0},
        "max_ongoing_requests": 10**6,
        "logging_config": {"enable_access_log": False},
    }
    app = FastAPI()

    class Driver:
        async def submit(self, name: str, request: dict[str, Any]) -> None:
            pass

    class Ingress:
        def __init__(self, driver: Any) -> None:
            self._driver = driver

        @app.post("/v1/completions")
        async def complete(self, request: Request) -> dict[str, Any]:
            await self._driver.submit.remote("ingress", await request.json())
            return {"choices": [{"text": "!"}]}

    driver = serve.deployment(name="Driver", **options)(Driver)
    ingress = serve.deployment(name="Ingress", **options)(serve.ingress(app)(Ingress))
    return ingress.bind(driver.bind())


def report(ours: Slopes, empty: Slopes) -> bool:
    """Print a line for each process. Whether all are within the mark."""
    print(f"{'bytes a request':22}     ours    empty    above")
    within = True
    for role, slopes in ours.items():
        like = max(empty.get(role, [0.0]))
        for slope in slopes:
            above = slope - max(0.0, like)
            verdict = "" if above <= _MOST_BYTES else "   too many"
            within = within and not verdict
            print(f"{role:22} {slope:8.0f} {like:8.0f} {above:8.0f}{verdict}")
    return within


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--warm-up", type=int, default=25_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write_counter_model(Path(folder) / "counter", cycle=range(32, 127))
        settings = {"model": str(model), "tensor_parallel_size": 2, "device": "cpu", "kv_cache_memory": "16MiB"}
        with served(build(settings)) as port:
            ours = asyncio.run(measure("ours", port, given.warm_up, given.requests))
        with served(empty_application()) as port:
            empty = asyncio.run(measure("empty", port, given.warm_up, given.requests))
    sys.exit(0 if report(ours, empty) else 1)


if __name__ == "__main__":
    main()
