"""Scaled rotary embedding against `transformers`, within the original context and far beyond it."""

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from model_shards.weights.metadata import read_spec
from tests.fakes.checkpoints import tiny_weights, write_tiny_model
from tests.fakes.gguf_files import write_gguf
from tests.fakes.reference import reference_model
from tests.model_shards.families.logits import (
    TOLERANCE,
    reference_greedy,
    reference_logits,
    sharded_greedy,
    sharded_logits,
)

TOKENS = torch.randint(0, 1003, (120,), generator=torch.Generator().manual_seed(0))
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
# Name -> overrides of a model with 32 positions, and how many it has then.
VARIANTS: dict[str, tuple[dict[str, Any], int]] = {
    "linear": ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 128),
    "llama3": ({"rope_scaling": LLAMA3, "max_position_embeddings": 256}, 256),
    "llama3, as parameters": (
        {
            "rope_parameters": {**LLAMA3, "rope_theta": 500.0},
            "rope_theta": ...,
            "max_position_embeddings": 128,
        },
        128,
    ),
    "yarn": ({"rope_scaling": YARN}, 128),
    "yarn, original positions by default": ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, 128),
    "yarn, already extended": ({"rope_scaling": YARN, "max_position_embeddings": 128}, 128),
    "yarn, given attention factor": ({"rope_scaling": {**YARN, "attention_factor": 0.7}}, 128),
    "yarn, magnitudes": ({"rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0}}, 128),
    "yarn, own ramp": ({"rope_scaling": {**YARN, "beta_fast": 4.0, "beta_slow": 0.5, "truncate": False}}, 128),
}


@pytest.fixture(scope="module")
def variant(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def written(name: str) -> tuple[Path, Any]:
        overrides = {"max_position_embeddings": 32, **VARIANTS[name][0]}
        folder = write_tiny_model(tmp_path_factory.mktemp("model"), "llama", head_dim=32, **overrides)
        return folder, reference_model(folder)

    return written


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers_beyond_the_original_context(variant: Any, name: str) -> None:
    folder, reference = variant(name)
    assert read_spec(folder).max_positions == VARIANTS[name][1]
    torch.testing.assert_close(
        sharded_logits(folder, 2, TOKENS), reference_logits(reference, TOKENS), rtol=0, atol=TOLERANCE
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_the_scaling_matters(variant: Any, name: str, tmp_path: Path) -> None:
    """Else the test above could not fail."""
    folder, _ = variant(name)
    theta = read_spec(folder).rope_theta
    plain = write_tiny_model(tmp_path, "llama", head_dim=32, rope_theta=theta)
    assert (sharded_logits(plain, 1, TOKENS) - sharded_logits(folder, 1, TOKENS)).abs().max() > 0.1


@pytest.mark.parametrize("name", ["linear", "llama3", "yarn"])
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_greedy_tokens_equal_transformers(variant: Any, name: str, ranks: int) -> None:
    folder, reference = variant(name)
    prompt = TOKENS[:30]
    assert sharded_greedy(folder, ranks, prompt, 12) == reference_greedy(reference, prompt, 12)


def test_dynamic_scaling_is_exact_up_to_the_models_positions(tmp_path: Path) -> None:
    """And goes no further: there the frequencies would depend on how the prompt came in chunks."""
    scaling = {"type": "dynamic", "factor": 4.0}
    folder = write_tiny_model(tmp_path, "llama", max_position_embeddings=64, rope_scaling=scaling)
    assert read_spec(folder).max_positions == 64
    tokens = TOKENS[:64]
    torch.testing.assert_close(
        sharded_logits(folder, 2, tokens),
        reference_logits(reference_model(folder), tokens),
        rtol=0,
        atol=TOLERANCE,
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_divisors_in_a_gguf_file_are_llama3_scaling(variant: Any, tmp_path: Path, ranks: int) -> None:
    """The divisors are worked out here once more, as llama.cpp's converter does, from the wavelengths."""
    folder, reference = variant("llama3")
    config = json.loads((folder / "config.json").read_text())
    wavelengths = 2 * math.pi * 10_000.0 ** (torch.arange(0, 32, 2).double() / 32)
    divisors = []
    for wavelength in wavelengths.tolist():
        smooth = (32 / wavelength - 1.0) / (4.0 - 1.0)
        between = 1 / ((1 - smooth) / 8.0 + smooth)
        divisors.append(1.0 if wavelength < 32 / 4 else 8.0 if wavelength > 32 else between)
    assert {1.0, 8.0} < set(divisors)
    write_gguf(tmp_path / "m.gguf", config, tiny_weights(config, seed=0), rope_divisors=torch.tensor(divisors))
    torch.testing.assert_close(
        sharded_logits(tmp_path / "m.gguf", ranks, TOKENS),
        reference_logits(reference, TOKENS),
        rtol=0,
        atol=TOLERANCE,
    )
