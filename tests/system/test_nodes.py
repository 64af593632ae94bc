"""What becomes of the service when a node of the cluster, or Ray's own memory, is lost."""

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.system.conftest import OK, counted, free_port, health
from tests.system.hosted_cluster import HostedCluster, Wanted, hosted
from tests.system.processes import wait_until
from tests.system.test_drain import begun

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

OUTAGE_S = {"redis": 30.0, "rocksdb": 5.0}  # without a GCS
WITHOUT_S = 5.0


def settings(path: Path, ranks: int, **more: Any) -> dict[str, Any]:
    return {
        "model": str(path),
        "tensor_parallel_size": ranks,
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


@pytest.fixture(scope="module")
def one_node_beside_the_head(counter_path: Path) -> Iterator[HostedCluster]:
    """The head has no CPU, so the group is on the other node. The GCS keeps its tables nowhere."""
    wanted = Wanted(free_port(), [0, 2], settings(counter_path, 2), ingress_on_head=True)
    with hosted(wanted) as cluster:
        yield cluster


def test_a_group_whose_node_is_lost_comes_back_once_there_is_room(one_node_beside_the_head: HostedCluster) -> None:
    cluster = one_node_beside_the_head
    assert answer_of(cluster) == counted("c", 8)
    cluster.tell("lose 1")
    wait_until(lambda: "2 bundles of 1 CPU wanted" in health(cluster.url), "it is said what is missing")
    refused = ask(cluster)
    assert refused.status_code == 503, refused.text
    assert int(refused.headers["retry-after"]) >= 1
    cluster.tell("add 2")
    wait_until(lambda: health(cluster.url) == OK, "the group is back")
    assert answer_of(cluster) == counted("c", 8)


def test_streams_go_on_for_a_while_when_a_gcs_is_lost_that_cannot_come_back(
    one_node_beside_the_head: HostedCluster,
) -> None:
    cluster = one_node_beside_the_head
    streams = begun(cluster.url, 2)
    cluster.tell("kill-gcs")
    time.sleep(WITHOUT_S)
    assert answer_of(cluster) == counted("c", 8)
    for stream in streams:
        stream.check()


@contextmanager
def storage(kind: str, folder: Path) -> Iterator[dict[str, str]]:
    """The environment of a cluster whose GCS keeps its tables there."""
    if kind == "rocksdb":
        yield {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(folder)}
    else:
        if shutil.which("redis-server") is None:
            pytest.skip("redis-server is not installed")
        port = free_port()
        server = subprocess.Popen(
            ["redis-server", "--port", str(port), "--save", "", "--bind", "127.0.0.1"], stdout=subprocess.DEVNULL
        )
        try:
            yield {"RAY_REDIS_ADDRESS": f"127.0.0.1:{port}"}
        finally:
            server.kill()
            server.wait()


@pytest.mark.parametrize("kind", ["redis", "rocksdb"])
def test_streams_go_on_without_the_gcs_and_so_does_the_service_once_it_is_back(
    kind: str, counter_path: Path, tmp_path: Path
) -> None:
    with storage(kind, tmp_path) as environment:
        wanted = Wanted(free_port(), [2], settings(counter_path, 2), environment)
        with hosted(wanted) as cluster:
            streams = begun(cluster.url, 2)
            cluster.tell("kill-gcs")
            time.sleep(OUTAGE_S[kind])
            assert answer_of(cluster) == counted("c", 8)
            cluster.tell("start-gcs")
            for stream in streams:
                stream.check()
            assert answer_of(cluster) == counted("c", 8)
