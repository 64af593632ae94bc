"""What the Dockerfile promises to KubeRay and to the pins, as far as its text shows."""

import re
from pathlib import Path

import pytest
import yaml

PROJECT = Path(__file__).resolve().parents[2]
DEPLOY = PROJECT / "deploy"


@pytest.fixture(scope="module")
def instructions() -> list[tuple[str, str]]:
    """(instruction, arguments), with continued lines joined and comments left out."""
    lines = [line for line in (DEPLOY / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    pairs = [line.split(maxsplit=1) for line in joined.splitlines() if line.strip()]
    return [(name, arguments) for name, arguments in pairs]


def of_kind(instructions: list[tuple[str, str]], kind: str) -> list[str]:
    return [arguments for name, arguments in instructions if name == kind]


def test_the_probes_of_kuberay_find_bash_and_wget(instructions: list[tuple[str, str]]) -> None:
    installed = next(line for line in of_kind(instructions, "RUN") if "apt-get install" in line)
    assert {"bash", "wget"} <= set(installed.split())


def test_it_runs_as_the_user_of_the_manifests(instructions: list[tuple[str, str]]) -> None:
    assert of_kind(instructions, "USER")[-1] == "1000"
    for path in (DEPLOY / "kuberay").glob("*.yaml"):
        assert set(re.findall(r"runAsUser: (\d+)", path.read_text())) == {"1000"}


def test_every_install_is_pinned(instructions: list[tuple[str, str]]) -> None:
    installs = [line for line in of_kind(instructions, "RUN") if "pip install" in line]
    assert installs
    assert all("-c constraints.txt" in line for line in installs)


def test_what_is_copied_exists_and_reaches_the_build(instructions: list[tuple[str, str]]) -> None:
    kept = {
        line.removeprefix("!")
        for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    copied = {name for line in of_kind(instructions, "COPY") for name in line.split()[:-1]}
    assert copied == kept
    assert [name for name in copied if not (PROJECT / name).exists()] == []


def test_the_packages_are_all_copied(instructions: list[tuple[str, str]]) -> None:
    copied = {name for line in of_kind(instructions, "COPY") for name in line.split()[:-1]}
    packages = {path.parent.name for path in PROJECT.glob("*/__init__.py")} - {"tests"}
    assert packages <= copied


def test_python_is_the_one_of_the_project(instructions: list[tuple[str, str]]) -> None:
    assert of_kind(instructions, "FROM") == ["python:3.11-slim"]
    assert 'python_version = "3.11"' in (PROJECT / "pyproject.toml").read_text()


def test_the_caches_are_where_the_manifests_mount_them(instructions: list[tuple[str, str]]) -> None:
    hub_cache = re.search(r"HF_HOME=(\S+)", " ".join(of_kind(instructions, "ENV")))
    assert hub_cache is not None
    for service in (next(yaml.safe_load_all(path.read_text())) for path in (DEPLOY / "kuberay").glob("*.yaml")):
        for group in service["spec"]["rayClusterConfig"]["workerGroupSpecs"]:
            mounts = group["template"]["spec"]["containers"][0]["volumeMounts"]
            assert hub_cache[1] in [mount["mountPath"] for mount in mounts]
