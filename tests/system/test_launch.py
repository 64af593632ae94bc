"""The launcher as a user runs it: serves, ends on Ctrl-C, and leaves nothing, even when it is killed itself."""

import contextlib
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from cluster.launch.processes import processes_writing
from cluster.launch.run_folder import default_parent, reclaim_abandoned
from tests.fakes.checkpoints import write_hollow_llama
from tests.system.processes import descendants, kill, marked, shared_files, wait_until
from tests.system.test_drain import begun

pytestmark = [pytest.mark.system, pytest.mark.timeout(400)]

_DEADLINE_S = 180


class Launcher:
    """`shardserve ARGUMENTS` in a process group of its own, as a terminal would have it."""

    def __init__(self, *arguments: str, data_limit: int | None = None, **environment: str) -> None:
        """`data_limit` are bytes that it and whatever it starts may have each."""
        self.lines: list[str] = []
        self._ready_or_over = threading.Event()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cluster.cli", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "RAY_ADDRESS": "", "COLUMNS": "200", **environment},
        )
        if data_limit is not None:  # before it has started anything
            resource.prlimit(self.process.pid, resource.RLIMIT_DATA, (data_limit, data_limit))
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
def _launched(*arguments: str, data_limit: int | None = None) -> Iterator[Launcher]:
    launcher = Launcher(*arguments, data_limit=data_limit)
    try:
        yield launcher
    finally:
        launcher.process.kill()
        launcher.wait()
        reclaim_abandoned()


@pytest.fixture
def counter(counter_path: Path) -> str:
    return str(counter_path)


def _serve(model: str, port: int) -> tuple[str, ...]:
    settings = ("--tp", "2", "--device", "cpu", "--dtype", "float32", "--kv-cache-memory", "16MiB")
    return ("serve", model, *settings, "--served-model-name", "counter", "--address", "local", "--port", str(port))


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _ranks_below(pid: int) -> list[int]:
    return [below for below, title in descendants(pid).items() if title.startswith("ray::WorkerActor")]


def _run_folders() -> set[Path]:
    return set(default_parent().glob("shardserve-run-*"))


def _as_a_client(address: str | None, **more: str) -> str:
    """Three tokens by `Client` in a process that knows nothing but, at most, the address."""
    script = (
        "from shardserve import Client, SamplingParams\n"
        f"client = Client.connect(address={address!r})\n"
        "print(client.generate('a', SamplingParams(max_tokens=3, temperature=0)).choices[0].text)"
    )
    environment = {**os.environ, "RAY_ADDRESS": "", **more}
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


@pytest.mark.parametrize("proxy", ["serve", "haproxy"])
def test_it_serves_until_ctrl_c_and_leaves_nothing(counter: str, proxy: str) -> None:
    port = _free_port()
    # The stream must end before the deadline does, on a busy machine too.
    with _launched(*_serve(counter, port), "--proxy", proxy, "--drain-deadline-s", "300") as launcher:
        launcher.wait_ready()
        body = {"model": "counter", "prompt": "a", "max_tokens": 3, "temperature": 0}
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60)
        assert answer.json()["choices"][0]["text"] == "bcd"
        if proxy == "serve":
            assert _as_a_client(launcher.ray_address) == "bcd"
            assert _as_a_client(None) == "bcd"
        else:
            assert _as_a_client(None, RAY_SERVE_THROUGHPUT_OPTIMIZED="1") == "bcd", "as on its nodes"
        folder = launcher.folder
        assert processes_writing(folder)
        (stream,) = begun(f"http://127.0.0.1:{port}", 1, tokens=400)
        launcher.interrupt()
        launcher.wait_for("^ending: running streams may finish first")
        stream.check()
        assert launcher.wait() == 0, launcher.output
    assert processes_writing(folder) == []
    assert not folder.exists()
    assert "Traceback" not in launcher.output


def test_it_ends_and_says_so_when_rays_gcs_is_lost(counter: str) -> None:
    with _launched(*_serve(counter, _free_port())) as launcher:
        launcher.wait_ready()
        folder = launcher.folder
        (gcs,) = [pid for pid, title in descendants(launcher.process.pid).items() if "/gcs_server " in title]
        kill(gcs)
        assert launcher.wait() == 1, launcher.output
    said = "^error: Ray's gcs_server.* has ended, and with it this Ray"
    assert re.search(said, launcher.output, re.MULTILINE), launcher.output
    assert "Traceback" not in launcher.output
    assert processes_writing(folder) == []
    assert not folder.exists()


def test_it_may_be_killed_any_number_of_times(counter: str, request: pytest.FixtureRequest) -> None:
    """At any moment of its start, alone or with some of what it has started, and at last while it serves: the next
    start clears away.
    """
    before, marker = shared_files(), uuid.uuid4().hex
    chance = random.Random(request.config.getoption("--seed"))
    for _ in range(request.config.getoption("--launcher-kills")):
        launcher = Launcher(*_serve(counter, _free_port()), MARKER=marker)
        time.sleep(chance.uniform(0.5, 9))
        below = sorted(descendants(launcher.process.pid))
        for pid in (launcher.process.pid, *chance.sample(below, min(len(below), chance.randint(0, 3)))):
            with contextlib.suppress(ProcessLookupError):
                kill(pid)
        launcher.process.wait(_DEADLINE_S)
    port = _free_port()
    with _launched(*_serve(counter, port)) as launcher:
        launcher.wait_ready()
        assert marked(marker) == [], "it has ended what the others left"
        (stream,) = begun(f"http://127.0.0.1:{port}", 1, tokens=20)
        stream.check()
        folder = launcher.folder
        kill(launcher.process.pid)
        launcher.process.wait(_DEADLINE_S)
        assert folder in reclaim_abandoned()
    assert processes_writing(folder) == []
    assert not folder.exists()
    assert shared_files() - before == set()


@pytest.mark.parametrize(
    "broken",
    ["nothing there", "no config.json", "not JSON", "no weights", "weights cut short", "no room", "port taken"],
)
def test_what_can_be_known_is_said_before_anything_starts(counter: str, tmp_path: Path, broken: str) -> None:
    before = _run_folders()
    model, more = tmp_path / "model", tuple[str, ...]()
    shutil.copytree(counter, model)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = _free_port()
        match broken:
            case "nothing there":
                model = tmp_path / "nowhere"
                said, code = "nowhere", 2
            case "no config.json":
                (model / "config.json").unlink()
                said, code = r"config\.json", 2
            case "not JSON":
                (model / "config.json").write_text("{")
                said, code = r"config\.json", 2
            case "no weights":
                for file in model.glob("*.safetensors"):
                    file.unlink()
                said, code = "safetensors", 2
            case "weights cut short":
                (weights,) = model.glob("*.safetensors")
                weights.write_bytes(weights.read_bytes()[:-64])
                said, code = weights.name, 2
            case "no room":
                more = ("--kv-cache-memory", "4KiB", "--max-model-len", "4096")
                said, code = "one sequence of max_model_len 4096 tokens needs", 1
            case _:
                port = other.getsockname()[1]
                said, code = rf"port {port} is in use by \w+ \(pid {os.getpid()}\).*--port \d+", 1
        with _launched(*_serve(str(model), port), *more) as launcher:
            assert launcher.wait() == code, launcher.output
    assert re.search(rf"^error: .*{said}", launcher.output, re.MULTILINE), launcher.output
    assert "Traceback" not in launcher.output
    assert _run_folders() == before


def test_a_rank_that_dies_while_it_starts_is_named(counter: str) -> None:
    before = _run_folders()
    with _launched(*_serve(counter, _free_port())) as launcher:
        pid = launcher.process.pid
        wait_until(lambda: bool(_ranks_below(pid)), "a rank has come", _DEADLINE_S)
        kill(_ranks_below(pid)[0])
        assert launcher.wait() == 1, launcher.output
    assert re.search(r"^error: .*rank \d ", launcher.output, re.MULTILINE), launcher.output
    assert "Traceback" not in launcher.output
    assert _run_folders() == before


def test_a_rank_without_memory_says_so(tmp_path: Path) -> None:
    """What `ulimit -d` allows is enough for Ray and torch, and not for the weights."""
    before = _run_folders()
    model = write_hollow_llama(tmp_path / "model", vocab_size=2**24)  # 6 GiB each of embedding and head
    with _launched(*_serve(str(model), _free_port()), data_limit=3 * 2**30) as launcher:
        assert launcher.wait() == 1, launcher.output
    said = r"^error: rank \d \(pid \d+ on [\d.]+\) could not load: no memory for its shard .*ulimit -d"
    assert re.search(said, launcher.output, re.MULTILINE), launcher.output
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
