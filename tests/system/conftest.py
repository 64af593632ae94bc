"""One real Ray with our application on it, shared by all system tests: the counter model over two ranks."""

import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.client import Client
from cluster.engine.stats import EngineStats
from cluster.launch.ray_node import PROXY_CALLBACK
from tests.fakes.checkpoints import write_counter_model
from tests.system.processes import wait_until

# By default a local Ray writes a token into the user's home, and later ones then start in another way.
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"] = PROXY_CALLBACK
os.environ["RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS"] = "1"
# 15 by default: on a busy machine everything here would starve. Ray spells it in this way.
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112

PRINTABLE = range(32, 127)
MODEL = "counter"
NUM_CPUS = 4  # as Ray counts
OK = "ok"


def health(url: str) -> str:
    """`OK`, or what `/health` says instead; empty without an answer."""
    try:
        answer = httpx.get(f"{url}/health", timeout=5)
    except httpx.HTTPError:
        return ""
    return OK if answer.status_code == 200 else answer.text


@dataclass
class Served:
    """The application as a client finds it."""

    url: str
    client: Client
    driver: Any

    def stats(self) -> EngineStats:
        stats: EngineStats = self.driver.stats.remote().result(timeout_s=30)
        return stats

    def is_healthy(self) -> bool:
        return health(self.url) == OK

    def wait_healthy(self) -> None:
        wait_until(self.is_healthy, "the application is healthy")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What is done as often as an option says takes as long as that."""
    seconds = {
        "test_chaos": 300 + 120 * config.getoption("--kills"),
        "test_it_may_be_killed_any_number_of_times": 400 + 30 * config.getoption("--launcher-kills"),
    }
    for item in items:
        if item.name in seconds:
            item.add_marker(pytest.mark.timeout(seconds[item.name]), append=False)


def counted(after: str, count: int) -> str:
    """The counter model's answer: the printable characters that follow `after`, over and over."""
    first = ord(after[-1]) - PRINTABLE.start + 1
    return "".join(chr(PRINTABLE.start + (first + i) % len(PRINTABLE)) for i in range(count))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="session")
def counter_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_counter_model(tmp_path_factory.mktemp("models") / MODEL, cycle=PRINTABLE)


@pytest.fixture(scope="package")  # tests elsewhere that start a Ray must find none
def application(counter_path: Path) -> Iterator[Served]:
    import ray
    from ray import serve
    from ray.serve.config import HTTPOptions

    from cluster.application import DRIVER, build

    # Room for a second application beside this one.
    ray.init(
        address="local",
        num_cpus=NUM_CPUS,
        include_dashboard=False,
        object_store_memory=150 * 2**20,
        log_to_driver=False,
    )
    try:
        port = free_port()
        serve.start(http_options=HTTPOptions(host="127.0.0.1", port=port))
        settings = {
            "model": str(counter_path),
            "tensor_parallel_size": 2,
            "device": "cpu",
            "kv_cache_memory": "16MiB",
            "max_num_seqs": 64,
            "step_deadline_s": 6,
            "max_recoveries": 1000,
            "drain_deadline_s": 5,
            "allow_priority": True,
        }
        serve.run(build(settings), name="shardserve")
        driver = serve.get_deployment_handle(DRIVER, "shardserve")
        yield Served(f"http://127.0.0.1:{port}", Client.connect(), driver)
        serve.shutdown()
    finally:
        ray.shutdown()


@pytest.fixture
def say(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Shows a line at once, beside pytest's own output."""
    terminal = request.config.pluginmanager.getplugin("terminalreporter")
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def say(line: str) -> None:
        with capture.global_and_fixture_disabled():
            terminal.write_line(line)

    return say


@pytest.fixture
def served(application: Served) -> Served:
    """The shared application, healthy and idle, whatever the test before did to it."""
    application.wait_healthy()
    wait_until(lambda: application.stats().running == 0, "the engine is idle")
    return application
