"""`shardserve plan` as a user runs it: tables, JSON, a config without weights, and mistakes by name."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from cluster.cli import app

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A config and nothing else."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def run(*arguments: str | Path, columns: int = 200) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)], env={"COLUMNS": str(columns)})


def test_tables_for_people_fit_a_narrow_terminal(folder: Path) -> None:
    result = run(folder, "--tp", "2", "--gpu-memory", "80GiB", columns=80)
    assert result.exit_code == 0, result.output
    for part in ("2 cuda rank(s)", "6+2", "rows: 384 + 192", "whole on every rank", "prefill of 1024 tokens"):
        assert part in result.stdout
    assert "\N{HORIZONTAL ELLIPSIS}" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (["--gpu-memory", "80GiB"], "what the weights leave of 90% of 80.0 GiB"),
        ([], "2.0 GiB over all ranks, the default on CPU"),
        (["--kv-cache-memory", "64MiB"], "kv_cache_memory is 64.0 MiB over all ranks"),
    ],
)
def test_what_limits_the_cache_is_said(folder: Path, arguments: list[str], rule: str) -> None:
    assert rule in run(folder, *arguments).stdout


def test_json_for_programs(folder: Path) -> None:
    result = run(
        folder,
        "--tp",
        "2",
        "--gpu-memory",
        "1GiB",
        "--shard-weights",
        "2,1",
        "--batch",
        "4",
        "--json",
        "--prompt-len",
        "7",
    )
    plan = json.loads(result.stdout)
    assert (plan["device"], plan["dtype"], plan["gpu_memory"]) == ("cuda", "bfloat16", 2**30)
    first, second = (rank["shard_bytes"] for rank in plan["ranks"])
    assert 1.9 < first / second < 2.1
    assert [prediction["tokens_per_s"] > 0 for prediction in plan["predictions"]] == [True, True]
    assert plan["predictions"][1]["sequences"] == 4
    assert {cut["rule"] for cut in plan["tensors"]} == {"rows", "columns", "whole"}


def test_ceilings_can_be_given(folder: Path) -> None:
    ceilings = [
        "--peak-tflops",
        "2",
        "--memory-bandwidth",
        "3GB",
        "--link-bandwidth",
        "4GB",
        "--link-latency-us",
        "5",
    ]
    plan = json.loads(run(folder, *ceilings, "--json").stdout)
    assert plan["ceilings"] == {
        "flops": 2e12,
        "memory_bandwidth": 3e9,
        "link_bandwidth": 4e9,
        "link_latency_s": pytest.approx(5e-6),
    }
    assert plan["device"] == "cpu"


def test_settings_may_come_from_a_file(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(f"model: {folder}\ntensor_parallel_size: 3\nshard_weights: [1, 1, 2]\n")
    plan = json.loads(run("--config", file, "--json").stdout)
    assert plan["tensor_parallel_size"] == 3
    assert plan["ranks"][2]["vocabulary"] > 1.9 * plan["ranks"][0]["vocabulary"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tp", "10"], "9 query heads cannot be split over 10 ranks"),
        (["--gpu-memory", "much"], "error: --gpu-memory: not a size in bytes: 'much'"),
        (["--memory-bandwidth", "0"], "error: --memory-bandwidth: must be more than 0"),
        (["--batch", "1,x"], "error: --batch: whole numbers from 1 on"),
        (["--batch", "0"], "error: --batch: whole numbers from 1 on"),
        (["--device", "cpu", "--gpu-memory", "1GiB"], "error: --gpu-memory: the device is cpu"),
        (["--tp", "2", "--shard-weights", "2,1,1"], "shard_weights has 3 numbers, but there are 2 ranks"),
        (["--tp", "2", "--shard-weights", "2,0"], "--shard-weights: input should be greater than or equal to 1"),
        (["--tp", "2", "--shard-weights", "2,x"], "--shard-weights: input should be a valid integer"),
    ],
)
def test_mistakes_are_named(folder: Path, arguments: list[str], message: str) -> None:
    result = run(folder, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    result = run(tmp_path)
    assert result.exit_code == 2
    assert "it has no config.json" in result.stderr
