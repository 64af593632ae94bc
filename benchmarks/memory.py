"""How many bytes each process grows by a request: one-token requests over HTTP, beside an empty Serve application.

    python -m benchmarks.memory [--requests 20000]

Ours is the counter model on two ranks; the empty one has the same two deployments, of which the first makes one
call to the second for each request and does nothing else. Each gets 2,000 requests to warm up; then the private
memory (`RssAnon`) of its processes is read ten times, and a line is fitted. Allocators take memory in pieces of 64
KB and more, so a slope from fewer than 10,000 requests says little.

Ends with exit code 1 when a process of ours grows by more than 100 bytes a request above its like.
"""

import argparse
import asyncio
import socket
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI, Request
from ray import serve
from ray.serve.config import HTTPOptions

from cluster.application import build
from cluster.driver import local_ray
from tests.fakes.checkpoints import write_counter_model
from tests.system.processes import descendants

_WARM_UP = 2_000
_READINGS = 10
_AT_ONCE = 16
_MOST_BYTES = 100.0
_LIMIT_S = 60.0  # of one request
_ROLES = {
    "ray::ServeReplica:memory:Ingress": "ingress",
    "ray::ServeReplica:memory:Driver": "driver",
    "ray::WorkerActor": "rank",
    "ray::ProxyActor": "proxy",
    "ray::ServeController": "controller",
}

Memory = dict[int, int]  # pid -> bytes
Slopes = dict[str, list[float]]  # role -> bytes a request, of each process


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


async def load(url: str, count: int) -> None:
    left = iter(range(count))

    async def slot(client: httpx.AsyncClient) -> None:
        for number in left:
            body = {"model": "counter", "prompt": f"request {number}", "max_tokens": 1}
            response = await client.post("/v1/completions", json=body)
            response.raise_for_status()

    async with httpx.AsyncClient(base_url=url, timeout=_LIMIT_S) as client, asyncio.TaskGroup() as slots:
        for _ in range(_AT_ONCE):
            slots.create_task(slot(client))


def measure(url: str, count: int) -> Slopes:
    asyncio.run(load(url, _WARM_UP))
    readings = [private_memory()]
    for _ in range(_READINGS):
        asyncio.run(load(url, count // _READINGS))
        readings.append(private_memory())
    slopes: Slopes = {}
    sent = [index * (count // _READINGS) for index in range(len(readings))]
    for pid, title in sorted(descendants().items()):
        role = next((role for prefix, role in _ROLES.items() if title.startswith(prefix)), None)
        if role is not None and all(pid in reading for reading in readings):
            grown = [reading[pid] for reading in readings]
            slopes.setdefault(role, []).append(statistics.linear_regression(sent, grown).slope)
    return slopes


@contextmanager
def served(application: serve.Application) -> Iterator[str]:
    """On a Ray of its own, at the URL that this gives."""
    with local_ray.ensure_ray(2):
        port = _free_port()
        serve.start(http_options=HTTPOptions(host="127.0.0.1", port=port))
        serve.run(application, name="memory")
        yield f"http://127.0.0.1:{port}"
        serve.shutdown()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
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
    print("bytes a request     ours    empty    above")
    within = True
    for role, slopes in ours.items():
        like = max(empty.get(role, [0.0]))
        for slope in slopes:
            above = slope - max(0.0, like)
            within = within and above <= _MOST_BYTES
            print(
                f"{role:15s} {slope:8.0f} {like:8.0f} {above:8.0f}{'' if above <= _MOST_BYTES else '   too many'}"
            )
    return within


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=20_000)
    count = parser.parse_args().requests
    with tempfile.TemporaryDirectory() as folder:
        model = write_counter_model(Path(folder) / "counter", cycle=range(32, 127))
        settings = {"model": str(model), "tensor_parallel_size": 2, "device": "cpu", "kv_cache_memory": "16MiB"}
        with served(build(settings)) as url:
            ours = measure(url, count)
        with served(empty_application()) as url:
            empty = measure(url, count)
    sys.exit(0 if report(ours, empty) else 1)


if __name__ == "__main__":
    main()
