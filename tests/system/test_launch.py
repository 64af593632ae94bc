"""The launcher as a user runs it: serves, ends on Ctrl-C, and leaves nothing, even when it is killed itself."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from cluster.launch.processes import processes_writing
from cluster.launch.run_folder import default_parent, reclaim_abandoned
from tests.fakes.checkpoints import write_counter_model

pytestmark = [pytest.mark.system, pytest.mark.timeout(400)]

_DEADLINE_S = 180


class Launcher:
    """`shardserve ARGUMENTS` in a process group of its own, as a terminal would have it."""

    def __init__(self, *arguments: str) -> None:
        self.lines: list[str] = []
        self._ready_or_over = threading.Event()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cluster.cli", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "RAY_ADDRESS": "", "COLUMNS": "200"},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if "Ctrl-C drains" in line:
                self._ready_or_over.set()
        self._ready_or_over.set()

    def wait_ready(self) -> None:
        assert self._ready_or_over.wait(_DEADLINE_S), self.output
        assert self.process.poll() is None, self.output

    def wait_for(self, pattern: str) -> None:
        deadline = time.monotonic() + _DEADLINE_S
        while not re.search(pattern, self.output, re.MULTILINE):
            assert time.monotonic() < deadline, self.output
            time.sleep(0.05)

    def wait(self) -> int:
        code = self.process.wait(_DEADLINE_S)
        self._reader.join(_DEADLINE_S)
        return code

    @property
    def output(self) -> str:
        return "".join(self.lines)

    @property
    def folder(self) -> Path:
        """The run folder, from the line that tells where the logs are."""
        match = re.search(r"^logs: (\S*shardserve-run-\w+)", self.output, re.MULTILINE)
        assert match is not None, self.output
        return Path(match[1])

    @property
    def ray_address(self) -> str:
        """From the line that says how a Python client connects."""
        match = re.search(r'Client\.connect\(address="(\S+)"\)', self.output)
        assert match is not None, self.output
        return match[1]

    def interrupt(self) -> None:
        """What a terminal does on Ctrl-C: the whole foreground group gets it."""
        os.killpg(self.process.pid, signal.SIGINT)


@contextmanager
def _launched(*arguments: str) -> Iterator[Launcher]:
    launcher = Launcher(*arguments)
    try:
        yield launcher
    finally:
        launcher.process.kill()
        launcher.wait()
        reclaim_abandoned()


@pytest.fixture(scope="module")
def counter(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_counter_model(tmp_path_factory.mktemp("counter")))


def _serve(model: str, port: int) -> tuple[str, ...]:
    settings = ("--tp", "2", "--device", "cpu", "--dtype", "float32", "--kv-cache-memory", "16MiB")
    return ("serve", model, *settings, "--served-model-name", "counter", "--address", "local", "--port", str(port))


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _run_folders() -> set[Path]:
    return set(default_parent().glob("shardserve-run-*"))


def _as_a_client(address: str | None) -> str:
    """Three tokens by `Client` in a process that knows nothing but, at most, the address."""
    script = (
        "from shardserve import Client, SamplingParams\n"
        f"client = Client.connect(address={address!r})\n"
        "print(client.generate('a', SamplingParams(max_tokens=3, temperature=0)).choices[0].text)"
    )
    environment = {**os.environ, "RAY_ADDRESS": ""}
    ended = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=_DEADLINE_S,
        env=environment,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def test_it_serves_until_ctrl_c_and_leaves_nothing(counter: str) -> None:
    port = _free_port()
    with _launched(*_serve(counter, port)) as launcher:
        launcher.wait_ready()
        body = {"model": "counter", "prompt": "a", "max_tokens": 3, "temperature": 0}
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60)
        assert answer.json()["choices"][0]["text"] == "bcd"
        assert _as_a_client(launcher.ray_address) == _as_a_client(None) == "bcd"
        folder = launcher.folder
        assert processes_writing(folder)
        launcher.interrupt()
        assert launcher.wait() == 0, launcher.output
    assert processes_writing(folder) == []
    assert not folder.exists()
    assert "Traceback" not in launcher.output


def test_what_a_killed_launcher_leaves_is_reclaimed(counter: str) -> None:
    with _launched(*_serve(counter, _free_port())) as launcher:
        launcher.wait_ready()
        folder = launcher.folder
        launcher.process.send_signal(signal.SIGKILL)
        launcher.process.wait(_DEADLINE_S)
        assert folder in reclaim_abandoned()
    assert processes_writing(folder) == []
    assert not folder.exists()


def test_a_start_that_fails_says_why_and_leaves_nothing(counter: str) -> None:
    before = _run_folders()
    too_little = ("--kv-cache-memory", "4KiB", "--max-model-len", "4096")
    with _launched(*_serve(counter, _free_port()), *too_little) as launcher:
        assert launcher.wait() == 1, launcher.output
    assert re.search(r"^error: one sequence of max_model_len 4096 tokens needs", launcher.output, re.MULTILINE)
    assert "Traceback" not in launcher.output
    assert _run_folders() == before


def test_more_ranks_than_heads_are_refused_before_anything_starts(counter: str) -> None:
    before = _run_folders()
    with _launched(*_serve(counter, _free_port()), "--tp", "99") as launcher:
        assert launcher.wait() == 2, launcher.output
    assert re.search(r"^error: \d+ query heads cannot be split over 99 ranks", launcher.output, re.MULTILINE)
    assert "Ray" not in launcher.output
    assert _run_folders() == before


def test_a_signal_to_the_whole_group_while_loading_leaves_nothing(counter: str) -> None:
    """As `timeout` sends it: Ray's daemons get it too, and are gone while the launcher still ends."""
    before = _run_folders()
    with _launched(*_serve(counter, _free_port())) as launcher:
        launcher.wait_for(r"^ +HTTP +\d")
        os.killpg(launcher.process.pid, signal.SIGTERM)
        assert launcher.wait() == 130, launcher.output
    assert "Fatal" not in launcher.output
    assert "Check failed" not in launcher.output
    assert _run_folders() == before


@pytest.mark.smollm2
def test_the_demo_answers_once(smollm2_path: Path) -> None:
    before = _run_folders()
    with _launched("demo", "--once", "--address", "local", "--port", str(_free_port())) as launcher:
        assert launcher.wait() == 0, launcher.output
    assert re.search(r"first token +\d", launcher.output)
    assert len(launcher.output.split("why is the sky blue?")[1].split()) > 5
    assert _run_folders() == before
