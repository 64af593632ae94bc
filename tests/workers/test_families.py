"""Families with a step of their own, in batches: tokens as those of transformers, equal bits in any company."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.checkpoints import write_tiny_model
from tests.fakes.reference import reference_model
from tests.fakes.thread_group import ThreadGroup, run_ranks
from tests.workers.test_runner import generate, greedy_jobs, load

LENGTHS = (1, 33, 255, 300)
TOKENS = 4
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral, sliding window": ("mistral", {"sliding_window": 40}),
    "mistral, window over chunks": ("mistral", {"sliding_window": 270, "num_key_value_heads": 1}),
    "qwen2, a window in one layer": (
        "qwen2",
        {"head_dim": ..., "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "mixtral": ("mixtral", {}),
    "qwen3_moe": ("qwen3_moe", {"num_key_value_heads": 1}),
    "gpt2": ("gpt2", {"n_head": 5, "n_embd": 80, "n_positions": 1024}),
}


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_in_batches(tmp_path: Path, name: str, num_ranks: int) -> None:
    family, overrides = FAMILIES[name]
    folder = write_tiny_model(tmp_path, family, **overrides)
    jobs = greedy_jobs(LENGTHS, TOKENS)
    reference = reference_model(folder)
    expected = {
        number: reference.generate(
            torch.tensor([job.token_ids]), max_new_tokens=TOKENS, do_sample=False, eos_token_id=None
        )[0, len(job.token_ids) :].tolist()
        for number, job in jobs.items()
    }

    def work(group: ThreadGroup) -> None:
        model = load(folder, group)
        alone = {number: generate(model, group, {number: job}).logits[number] for number, job in jobs.items()}
        source = random.Random(num_ranks)  # equal on all ranks
        for seed in range(2):
            together = generate(model, group, jobs, chunk=lambda: source.choice([1, 3, 16, 31, 100]), seed=seed)
            assert together.tokens == expected
            for number in jobs:
                assert torch.equal(together.logits[number], alone[number]), number

    run_ranks(num_ranks, work)
