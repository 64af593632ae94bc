"""`serve deploy` takes the Serve config that we ship, on a Ray of its own that has a dashboard."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.system.conftest import counted, free_port
from tests.system.processes import wait_until

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

CONFIG = Path(__file__).resolve().parents[2] / "deploy" / "configs" / "cpu-tp2.yaml"
START_S = 200.0

# Runs until its standard input closes, so that no Ray outlives the test.
RAY_NODE = """
import sys, ray
ray.init(address="local", num_cpus=2, include_dashboard=True, dashboard_port=int(sys.argv[1]),
         object_store_memory=150 * 2**20, log_to_driver=False, _temp_dir=sys.argv[2])
print("ready", flush=True)
sys.stdin.read()
ray.shutdown()
"""


@pytest.fixture
def dashboard() -> Iterator[str]:
    """The address of a fresh Ray's dashboard."""
    port = free_port()
    # Not pytest's folder: its path is too long for the sockets in it.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        node = subprocess.Popen(
            [sys.executable, "-c", RAY_NODE, str(port), folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            assert node.stdout is not None
            assert node.stdout.readline() == b"ready\n"
            yield f"http://127.0.0.1:{port}"
            node.communicate(timeout=60)
        finally:
            if node.poll() is None:
                os.killpg(node.pid, signal.SIGKILL)
                node.wait()


def applications_at(dashboard: str) -> dict[str, Any]:
    answer = httpx.get(f"{dashboard}/api/serve/applications/", timeout=30)
    applications: dict[str, Any] = answer.raise_for_status().json()["applications"]
    return applications


def test_serve_deploy_takes_the_config_and_it_answers(dashboard: str, counter_path: Path, tmp_path: Path) -> None:
    config = yaml.safe_load(CONFIG.read_text())
    (application,) = config["applications"]
    application["args"] |= {"model": str(counter_path), "kv_cache_memory": "16MiB", "drain_deadline_s": 0}
    config["http_options"] = {"host": "127.0.0.1", "port": free_port()}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config))

    command = [sys.executable, "-m", "ray.serve.scripts", "deploy", str(file), "--address", dashboard]
    deployed = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert deployed.returncode == 0, deployed.stdout + deployed.stderr

    def has_settled() -> bool:
        state = applications_at(dashboard).get(application["name"], {})
        assert state.get("status") != "DEPLOY_FAILED", state.get("message")
        return bool(state.get("status") == "RUNNING")

    wait_until(has_settled, "the application runs", START_S)
    answer = httpx.post(
        f"http://127.0.0.1:{config['http_options']['port']}/v1/completions",
        json={"model": counter_path.name, "prompt": "abc", "max_tokens": 8, "temperature": 0},
        timeout=60,
    )
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == counted("c", 8)
