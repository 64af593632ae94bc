"""A Ray cluster of several nodes with our application on it, in a process of its own that does as it is told.

    python -m tests.system.hosted_cluster JSON

Reads one command a line and answers each with `done`, until it is killed with all that it has started. Only here
do tests touch Ray's own cluster for tests. Knows nodes and the GCS; knows nothing of requests.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.system.processes import all_of, descendants, wait_until

APPLICATION = "shardserve"
INGRESS = "ray::ServeReplica:shardserve:Ingress"
_ANSWER_S = 150.0


@dataclass(frozen=True)
class Wanted:
    """`nodes` are CPUs by node, the first of them the head; `settings` are those of `build`.

    With `ingress_on_head` the other nodes come once the ingress has its place, which is Ray's choice else.
    """

    port: int
    nodes: list[int]
    settings: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)
    ingress_on_head: bool = False


class HostedCluster:
    """The process, as a test talks to it."""

    def __init__(self, process: "subprocess.Popen[str]", port: int) -> None:
        self._process = process
        self.url = f"http://127.0.0.1:{port}"

    def tell(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        self._wait_done()

    def _wait_done(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line == "done\n":
                return
        raise AssertionError(f"the cluster ended with exit code {self._process.wait(_ANSWER_S)}")


@contextmanager
def hosted(wanted: Wanted) -> Iterator[HostedCluster]:
    """Yields once the application runs."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.system.hosted_cluster", json.dumps(asdict(wanted)), folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "RAY_ADDRESS": "", **wanted.environment},
        )
        try:
            cluster = HostedCluster(process, wanted.port)
            cluster._wait_done()
            yield cluster
        finally:
            for pid in (process.pid, *descendants(process.pid)):  # Ray would end each node in turn, some 7 s
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()


def settings(model: Path, **more: Any) -> dict[str, Any]:
    """Those that suit such a cluster."""
    return {
        "model": str(model),
        "tensor_parallel_size": 2,
        "device": "cpu",
        "kv_cache_memory": "16MiB",
        "step_deadline_s": 6,
        "drain_deadline_s": 0,
        **more,
    }


def ask(cluster: HostedCluster) -> httpx.Response:
    body = {"model": "counter", "prompt": "abc", "max_tokens": 8}
    return httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60)


def answer_of(cluster: HostedCluster) -> str:
    answer = ask(cluster)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def main(wanted: Wanted, folder: str) -> None:
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster
    from ray.serve.config import HTTPOptions

    from cluster.application import build

    common: dict[str, Any] = {"include_dashboard": False, "object_store_memory": 100 * 2**20}
    head, *others = wanted.nodes
    cluster = Cluster(initialize_head=True, head_node_args={**common, "num_cpus": head, "temp_dir": f"{folder}/r"})
    first: Any = cluster.head_node  # Ray says it may be None
    nodes = [first]

    def add(cpus: int) -> None:
        nodes.append(cluster.add_node(num_cpus=cpus, **common))

    if not wanted.ingress_on_head:
        for cpus in others:
            add(cpus)
    ray.init(address=cluster.address, log_to_driver=False)
    serve.start(http_options=HTTPOptions(host="127.0.0.1", port=wanted.port))
    application = build(wanted.settings)
    if wanted.ingress_on_head:
        target = serve.RunTarget(application, name=APPLICATION)
        serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
        wait_until(lambda: bool(all_of(INGRESS)), "the ingress has a process")
        for cpus in others:
            add(cpus)
        wait_until(lambda: serve.status().applications[APPLICATION].status == "RUNNING", "the application runs")
    else:
        serve.run(application, name=APPLICATION)
    print_done()
    for line in sys.stdin:
        match line.split():
            case ["lose", number]:  # as when its power fails: the raylet and everything below it
                raylet = nodes[int(number)].all_processes["raylet"][0].process.pid
                for pid in (raylet, *descendants(raylet)):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            case ["add", number]:
                add(int(number))
            case ["kill-gcs"]:
                first.kill_gcs_server()
            case ["start-gcs"]:
                first.start_gcs_server()
        print_done()


def print_done() -> None:
    sys.stdout.write("done\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(Wanted(**json.loads(sys.argv[1])), sys.argv[2])
