"""Options and a YAML file to settings: who wins, and how mistakes are named."""

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.cli.generate import generate
from cluster.cli.serve import serve
from cluster.cli.settings import cluster_config, option_name, serve_settings, settings_among
from cluster.errors import InvalidConfig
from cluster.generation import SamplingParams


def _file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    return path


def test_options_alone() -> None:
    config, launch = serve_settings({"model": "m", "tensor_parallel_size": 2, "port": 9000, "dtype": None}, None)
    assert (config.model, config.tensor_parallel_size, config.dtype) == ("m", 2, "auto")
    assert (launch.port, launch.host, launch.url) == (9000, "127.0.0.1", "http://127.0.0.1:9000")


def test_a_file_alone(tmp_path: Path) -> None:
    file = _file(tmp_path, "model: m\nkv_cache_memory: 1GiB\nhost: 0.0.0.0\nproxy: haproxy\n")
    config, launch = serve_settings({"model": None}, file)
    assert (config.model, config.kv_cache_memory) == ("m", 2**30)
    assert (launch.host, launch.proxy, launch.url) == ("0.0.0.0", "haproxy", "http://127.0.0.1:8000")


def test_options_win_over_the_file(tmp_path: Path) -> None:
    file = _file(tmp_path, "model: m\ntensor_parallel_size: 2\nmax_num_seqs: 8\n")
    config = cluster_config({"model": "other", "tensor_parallel_size": 3}, file)
    assert (config.model, config.tensor_parallel_size, config.max_num_seqs) == ("other", 3, 8)


def test_a_switch_that_is_given_wins_and_one_that_is_not_given_leaves_the_file(tmp_path: Path) -> None:
    file = _file(tmp_path, "model: m\nprefix_cache: false\n")
    assert [cluster_config({"prefix_cache": given}, file).prefix_cache for given in (None, True, False)] == [
        False,
        True,
        False,
    ]
    assert cluster_config({"model": "m"}, None).prefix_cache


def test_an_empty_file_is_no_settings(tmp_path: Path) -> None:
    assert cluster_config({"model": "m"}, _file(tmp_path, "# nothing\n")).model == "m"


@pytest.mark.parametrize(
    ("given", "text", "message"),
    [
        ({}, None, "MODEL is missing"),
        (
            {"model": "m", "tensor_parallel_size": 0},
            None,
            "--tp: input should be greater than or equal to 1, not 0",
        ),
        ({"model": "m", "port": 70000}, None, "--port: input should be less than or equal to 65535, not 70000"),
        ({"model": "m", "kv_cache_memory": "lots"}, None, "--kv-cache-memory: not a size in bytes: 'lots'"),
        ({"model": "m"}, "max_model_len: -1", "settings.yaml: max_model_len: input should be greater"),
        ({"model": "m"}, "tensor_paralel_size: 2", "settings.yaml: there is no setting 'tensor_paralel_size'"),
        ({"model": "m"}, "proxy: nginx", "settings.yaml: proxy: input should be 'auto', 'serve' or 'haproxy'"),
        ({"model": "m"}, "- a list", "settings by name are wanted"),
        ({"model": "m"}, "a: [1", "not YAML"),
        ({"model": "m"}, f"kv_cache_memory: {'9' * 5000}", "not YAML"),
        ({"model": "m", "kv_cache_memory": "9" * 400}, None, "--kv-cache-memory: a size in bytes must be below"),
        (
            {"model": "m", "served_model_name": ""},
            None,
            "--served-model-name: string should have at least 1 character",
        ),
        (
            {"model": "m", "max_num_seqs": 600},
            None,
            "max_num_batched_tokens (512) must be at least max_num_seqs (600)",
        ),
    ],
)
def test_mistakes_are_named_where_they_were_made(
    given: dict[str, Any], text: str | None, message: str, tmp_path: Path
) -> None:
    file = None if text is None else _file(tmp_path, text)
    with pytest.raises(InvalidConfig) as refusal:
        serve_settings(given, file)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_wrong_value_is_shown_once() -> None:
    with pytest.raises(InvalidConfig) as refusal:
        serve_settings({"model": "m", "kv_cache_memory": "5XB"}, None)
    assert str(refusal.value).count("5XB") == 1


def test_every_mistake_has_its_line() -> None:
    with pytest.raises(InvalidConfig) as refusal:
        serve_settings({"model": "m", "tensor_parallel_size": 0, "block_size": 0, "port": -1}, None)
    assert [line.split(":")[0] for line in str(refusal.value).splitlines()] == ["--tp", "--block-size", "--port"]


def test_a_missing_file() -> None:
    with pytest.raises(InvalidConfig, match=r"--config /no/such\.yaml: No such file or directory"):
        cluster_config({"model": "m"}, Path("/no/such.yaml"))


def test_option_names() -> None:
    assert option_name("tensor_parallel_size") == "--tp"
    assert option_name("max_num_seqs") == "--max-num-seqs"
    assert option_name("model") == "MODEL"


@pytest.mark.parametrize(
    ("command", "own"), [(serve, {"config"}), (generate, {"prompt", "source", "output", "config"})]
)
def test_every_option_is_a_setting_or_the_commands_own(command: Callable[..., None], own: set[str]) -> None:
    options = dict.fromkeys(inspect.signature(command).parameters, "given")
    sampling = {field.name for field in dataclasses.fields(SamplingParams)}
    known = settings_among(options).keys() | sampling | own
    assert options.keys() - known == {"tp"}
    assert settings_among(options)["tensor_parallel_size"] == "given"
