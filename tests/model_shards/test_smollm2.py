"""The real model: logits of SmolLM2-135M-Instruct against `transformers` on the same file, whole and cut."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model_shards.weights.file_sums import file_sums
from model_shards.weights.holdings import holdings_of
from model_shards.weights.loader import load_model
from model_shards.weights.metadata import read_spec
from model_shards.weights.proof import add_up, unproved
from tests.fakes.specs import SMOLLM2
from tests.fakes.thread_group import run_ranks
from tests.model_shards.families.logits import reference_logits, sharded_logits

# scripts/test leaves them what time the tests beside them do not take.
pytestmark = [pytest.mark.smollm2, pytest.mark.timeout(1800)]

TOKENS = torch.tensor(
    [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407]
)


@pytest.fixture(scope="module")
def expected(smollm2_reference: Any) -> Tensor:
    return reference_logits(smollm2_reference, TOKENS)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_logits_equal_transformers(smollm2_path: Path, expected: Tensor, ranks: int) -> None:
    logits = sharded_logits(smollm2_path, ranks, TOKENS)
    # Logits run to 30; float32 sums of 1,536 terms in another order differ by some 1e-4 after 30 layers.
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-3)
    assert torch.equal(logits.argmax(dim=-1), expected.argmax(dim=-1))


def test_spec(smollm2_path: Path) -> None:
    spec = read_spec(smollm2_path)
    assert spec == replace(
        SMOLLM2,
        norm_epsilon=spec.norm_epsilon,
        bos_token_id=1,
        eos_token_ids=(2,),
    )
    assert spec.norm_epsilon == pytest.approx(1e-5)


def test_two_ranks_prove_that_they_hold_the_file(smollm2_path: Path) -> None:
    models = run_ranks(
        2, lambda group: load_model(smollm2_path, group, device=torch.device("cpu"), dtype=torch.float32)
    )
    held = [holdings_of(model, smollm2_path, rank) for rank, model in enumerate(models)]
    shares = [file_sums(smollm2_path, torch.float32, share=share, num_shares=2) for share in range(2)]
    assert unproved(held, add_up(shares)) == {}
    assert len(add_up(shares)) == 272
