"""Ray's own memory, the GCS, is lost and comes back from where it keeps its tables."""

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.system.conftest import counted, free_port
from tests.system.hosted_cluster import Wanted, answer_of, hosted, settings
from tests.system.test_drain import begun

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

OUTAGE_S = {"redis": 30.0, "rocksdb": 5.0}  # without a GCS


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
        wanted = Wanted(free_port(), [2], settings(counter_path), environment)
        with hosted(wanted) as cluster:
            streams = begun(cluster.url, 2)
            cluster.tell("kill-gcs")
            time.sleep(OUTAGE_S[kind])
            assert answer_of(cluster) == counted("c", 8)
            cluster.tell("start-gcs")
            for stream in streams:
                stream.check()
            assert answer_of(cluster) == counted("c", 8)
