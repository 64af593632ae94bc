"""`shardserve generate` on the counter model, one rank in this process: text, batch, resuming, refusals."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from cluster.cli import app
from tests.fakes.checkpoints import write_counter_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("counter")
    write_counter_model(folder)
    return folder


def _generate(model: Path, *arguments: str | Path) -> Result:
    settings = (
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--kv-cache-memory",
        "8MiB",
        "--served-model-name",
        "counter",
    )
    return CliRunner().invoke(app, ["generate", str(model), *settings, *map(str, arguments)])


def _batch(folder: Path, *bodies: dict[str, object]) -> tuple[str, Path, str, Path]:
    lines = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": {"model": "counter", **body}}
        for i, body in enumerate(bodies)
    ]
    (folder / "in").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return ("--input", folder / "in", "--output", folder / "out")


def test_a_prompt_goes_on_in_the_terminal(model: Path) -> None:
    result = _generate(model, "--prompt", "ab", "--max-tokens", "5", "--temperature", "0")
    assert (result.exit_code, result.stdout) == (0, "cdefg\n")


def test_a_stop_string_ends_it(model: Path) -> None:
    result = _generate(model, "--prompt", "a", "--max-tokens", "50", "--stop", "klm")
    assert (result.exit_code, result.stdout) == (0, "bcdefghij\n")


def test_the_sampling_parameters_have_options(model: Path) -> None:
    shown = _generate(model, "--prompt", "a", "--stop", "klm", "--include-stop-str-in-output")
    assert (shown.exit_code, shown.stdout) == (0, "bcdefghijklm\n")
    biased = _generate(
        model, "--prompt", "a", "--max-tokens", "3", "--temperature", "0", "--logit-bias", "120=100",
        "--logit-bias", "121=-100",
    )  # fmt: skip
    assert (biased.exit_code, biased.stdout) == (0, "xxx\n")
    allowed = _generate(
        model, "--prompt", "a", "--allowed-token-ids", "98", "--allowed-token-ids", "99", "--bad-words", "c",
        "--max-tokens", "3", "--stop-token-ids", "100", "--min-tokens", "2", "--ignore-eos", "--min-p", "0.5",
        "--repetition-penalty", "1", "--presence-penalty", "0.5", "--frequency-penalty", "0.5",
    )  # fmt: skip
    assert (allowed.exit_code, allowed.stdout) == (0, "bbb\n")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--logit-bias", "5"], "--logit-bias must be a token id, = and a number, not '5'"),
        (["--min-p", "2"], "min_p must be between 0 and 1, not 2.0"),
        (["--bad-words", ""], "bad_words must not contain an empty string"),
    ],
)
def test_a_parameter_out_of_range_is_refused_before_anything_starts(
    tmp_path: Path, arguments: list[str], says: str
) -> None:
    result = _generate(tmp_path / "none", "--prompt", "a", *arguments)
    assert (result.exit_code, result.stderr) == (2, f"error: {says}\n")


def test_a_batch_is_answered_and_resumed(model: Path, tmp_path: Path) -> None:
    files = _batch(tmp_path, {"prompt": "a", "max_tokens": 3}, {"prompt": "", "max_tokens": 3})
    result = _generate(model, *files)
    assert result.exit_code == 0
    answers = {line["custom_id"]: line["response"] for line in map(json.loads, (tmp_path / "out").open())}
    assert answers["0"]["body"]["choices"][0]["text"] == "bcd"
    assert answers["1"]["status_code"] == 400
    assert "3 tokens" in result.stderr
    assert "1 refused" in result.stderr
    again = _generate(model, *files)
    assert again.exit_code == 0
    assert "2 of 2 requests are in" in again.stderr.replace("\n", " ")


def test_a_model_that_cannot_be_is_refused_before_anything_starts(tmp_path: Path) -> None:
    result = _generate(tmp_path / "none", "--prompt", "x")
    assert result.exit_code == 2
    assert "no such file or folder" in result.stderr


def test_what_does_not_fit_is_refused_with_the_numbers(model: Path) -> None:
    result = _generate(model, "--prompt", "x", "--max-model-len", "100000")
    assert result.exit_code == 2
    assert "error: max_model_len is 100000, but the model has 4096 positions" in result.stderr
