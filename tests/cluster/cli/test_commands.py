"""The commands as a user runs them: help, refusals and exit codes. Nothing here starts Ray or loads a model."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from cluster.cli import app
from tests.fakes.openai_server import FakeBehaviour, serve_fake

_NO_HEAVY_IMPORTS = """
import sys
import cluster.cli
heavy = {"torch", "ray", "httpx", "fastapi", "pydantic", "numpy", "transformers"} & sys.modules.keys()
sys.exit(f"the command line loads {heavy}" if heavy else 0)
"""


def _run(*arguments: str | Path, **environment: str) -> Result:
    settings = {"RAY_ADDRESS": "", "COLUMNS": "200", **environment}
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env=settings)


def _errors(result: Result) -> list[str]:
    assert isinstance(result.exception, SystemExit), result.exception
    return result.stderr.splitlines()


def test_the_command_line_loads_nothing_heavy() -> None:
    subprocess.run([sys.executable, "-c", _NO_HEAVY_IMPORTS], check=True)


@pytest.mark.parametrize("command", ["serve", "generate", "plan", "bench", "demo", "version"])
def test_every_command_has_help(command: str) -> None:
    result = _run(command, "--help")
    assert result.exit_code == 0
    assert f"shardserve {command}" in result.stdout


@pytest.mark.parametrize(
    ("command", "longest"), [("serve", "--max-num-batched-tokens"), ("generate", "--include-stop-str-in-output")]
)
def test_help_names_options_in_full_in_a_narrow_terminal(command: str, longest: str) -> None:
    assert longest in _run(command, "--help", COLUMNS="80").stdout


@pytest.mark.parametrize("how", ["version", "--version"])
def test_version(how: str) -> None:
    result = _run(how)
    assert (result.exit_code, result.stdout) == (0, "shardserve 0.1.0\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve"], "error: MODEL is missing: name it as the argument, or as `model` in the --config file"),
        (["serve", "m", "--tp", "0"], "error: --tp: input should be greater than or equal to 1, not 0"),
        (["serve", "m", "--kv-cache-memory", "much"], "error: --kv-cache-memory: not a size in bytes"),
        (["serve", "m", "--config", "/no/file"], "error: --config /no/file: No such file or directory"),
        (["generate", "m"], "error: give either --prompt, or --input with --output"),
        (
            ["generate", "m", "--prompt", "x", "--input", "y"],
            "error: give either --prompt, or --input with --output",
        ),
        (["generate", "m", "--input", "x"], "error: --input and --output belong together"),
        (
            ["generate", "m", "--prompt", "x", "--temperature", "3"],
            "error: temperature must be between 0 and 2, not 3.0",
        ),
        (
            ["generate", "m", "--input", "x", "--output", "y", "--max-tokens", "3"],
            "error: --max-tokens: every request of --input has its own",
        ),
        (["generate", "m", "--input", "/no/in", "--output", "/tmp/out"], "error: --input /no/in: No such file"),
        (["bench", "localhost:8000"], "error: URL must start with http:// or https://, not 'localhost:8000'"),
        (["bench", "http://x", "--concurrency", "1,two"], "error: --concurrency: whole numbers"),
        (["bench", "http://x", "--json", "/no/such/x.json"], "error: --json: there is no folder /no/such"),
        (["bench", "http://x", "--rate", "2", "--concurrency", "4"], "error: --concurrency is for a closed loop"),
        (["bench", "http://x", "--rate", "0"], "error: rate must be above 0"),
        (["demo", "--port", "0"], "error: --port: input should be greater than or equal to 1, not 0"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    result = _run(*arguments)
    (line,) = _errors(result)
    assert line.startswith(message)
    assert result.exit_code == 2


def test_an_unknown_option_is_exit_code_2() -> None:
    assert _run("serve", "m", "--tensor-parallel", "2").exit_code == 2


def test_serve_refuses_a_busy_port_with_another_to_take(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        result = _run("serve", tmp_path, "--address", "local", "--port", str(port))
    line = _errors(result)[-1]
    assert line.startswith(f"error: port {port} is in use by ")
    assert "choose another: --port " in line
    assert result.exit_code == 1


def test_serve_asks_which_ray_is_meant(tmp_path: Path) -> None:
    result = _run("serve", tmp_path, RAY_ADDRESS="192.0.2.7:6379")
    line = _errors(result)[-1]
    assert line.startswith(
        "error: a Ray cluster is known here: 192.0.2.7:6379 (RAY_ADDRESS); choose: --address auto"
    )
    assert result.exit_code == 1


def test_a_model_that_does_not_resolve_leaves_nothing(tmp_path: Path) -> None:
    """In a process of its own, because serving sets the environment and the signals of its process."""
    command = [
        sys.executable,
        "-m",
        "cluster.cli",
        "serve",
        "no-such-model",
        "--address",
        "local",
        "--port",
        _free_port(),
    ]
    environment = {**os.environ, "TMPDIR": str(tmp_path), "RAY_ADDRESS": ""}
    result = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=200)
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: unknown model 'no-such-model'")
    assert result.returncode == 2
    assert list(tmp_path.iterdir()) == []


def _free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def test_bench_shows_a_table_and_writes_json(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    with serve_fake(FakeBehaviour()) as url:
        sizes = ("--input-len", "8", "--output-len", "4", "--requests", "3")
        result = _run("bench", url, "--concurrency", "1,2", *sizes, "--json", file)
    assert result.exit_code == 0
    assert "fake-model" in result.stdout
    assert "2 at once" in result.stdout
    figures = json.loads(file.read_text())
    assert [level["completed"] for level in figures["levels"]] == [3, 3]
    assert figures["output_len"] == 4


def test_bench_with_failures_is_exit_code_1() -> None:
    with serve_fake(FakeBehaviour(fails_after_requests=3)) as url:
        result = _run(
            "bench", url, "--concurrency", "1", "--requests", "2", "--input-len", "8", "--output-len", "4"
        )
    assert result.exit_code == 1
    assert "1 at once: 1 x HTTP 500: told to fail later" in result.stdout


def test_bench_without_a_server_is_one_line() -> None:
    result = _run("bench", "http://127.0.0.1:9")
    (line,) = _errors(result)
    assert line.startswith("error: http://127.0.0.1:9: /v1/models gives no model (ConnectError")
    assert result.exit_code == 1
