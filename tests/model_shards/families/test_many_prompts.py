"""Case 32: each family on two ranks, 20 prompts against one rank and `transformers`: no gibberish that one prompt
would not show."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.checkpoints import write_tiny_model
from tests.fakes.reference import reference_model
from tests.model_shards.families.logits import TOLERANCE, random_prompts, reference_logits, sharded_logits_of

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, one KV head": ("llama", {"num_key_value_heads": 1}),
    "llama, biases, odd FFN": ("llama", {"attention_bias": True, "mlp_bias": True, "intermediate_size": 67}),
    "mistral, sliding window": ("mistral", {"sliding_window": 5}),
    "qwen2, tied": ("qwen2", {"head_dim": ..., "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3_moe": ("qwen3_moe", {}),
    "mixtral": ("mixtral", {}),
    "gpt2, fused QKV, 5 heads": ("gpt2", {"n_head": 5, "n_embd": 80}),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_twenty_prompts(tmp_path: Path, name: str) -> None:
    family, overrides = FAMILIES[name]
    folder = write_tiny_model(tmp_path, family, **overrides)
    prompts = random_prompts(20)
    reference = reference_model(folder)
    expected = torch.cat([reference_logits(reference, prompt) for prompt in prompts])
    for ranks in (1, 2):
        logits = sharded_logits_of(folder, ranks, prompts)
        torch.testing.assert_close(logits, expected, rtol=0, atol=TOLERANCE)
        assert torch.equal(logits.argmax(dim=-1), expected.argmax(dim=-1))
