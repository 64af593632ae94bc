"""The Serve configs are what `serve deploy` takes, and nothing in them is dropped in silence."""

import importlib
import re
from pathlib import Path

import pytest

from tests.deploy.serve_config import BUILDER, serve_config_problems

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "deploy" / "configs").glob("*.yaml"))
CPU_TP2 = next(path for path in CONFIGS if path.name == "cpu-tp2.yaml")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_a_config_has_no_problems(path: Path) -> None:
    assert serve_config_problems(path.read_text()) == []


def test_the_builder_is_where_the_configs_say() -> None:
    module, attribute = BUILDER.split(":")
    assert callable(getattr(importlib.import_module(module), attribute))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("proxy_location", "proxy_locations", "config: unknown key 'proxy_locations'"),
        ("proxy_location: EveryNode", "proxy_location: Everywhere", "proxy_location: .*HeadOnly"),
        ("  port: 8000", "  prot: 8000", r"config\.http_options: unknown key 'prot'"),
        ("  port: 8000", "  port: eight", "http_options.port: "),
        ("    route_prefix: /", "    route: /", r"config\.applications\[0\]: unknown key 'route'"),
        ("    args:", "    deployments: [{name: a, num_replica: 2}]\n    args:", "unknown key 'num_replica'"),
        (BUILDER, "cluster.app:build", "import_path is cluster.app:build"),
        ("      model: smollm2-135m\n", "", "args: model: Field required"),
        ("tensor_parallel_size: 2", "tensor_parallel_size: 0", "args: tensor_parallel_size"),
        ("device: cpu", "device: tpu", "args: device"),
        ("applications:", "applications: [", "not YAML"),
        ("applications:", "application:", "applications: Field required"),
    ],
)
def test_a_fault_is_found(old: str, new: str, words: str) -> None:
    text = CPU_TP2.read_text()
    assert old in text
    problems = serve_config_problems(text.replace(old, new))
    assert any(re.search(words, line) for line in problems), problems


def test_a_config_that_is_no_mapping_is_refused() -> None:
    assert serve_config_problems("- a\n- b\n") == ["a Serve config is a mapping, not list"]
