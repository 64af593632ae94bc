"""The decoder against `transformers`: every family, every awkward head count and head, over 1 to 4 ranks."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor

from model_shards.layers import linear
from model_shards.layers.rotary import Rotation
from model_shards.weights.loader import load_model
from tests.fakes.checkpoints import tiny_weights, write_folder, write_tiny_model
from tests.fakes.gguf_files import write_gguf
from tests.fakes.plain_attention import PlainAttention, query_and_key
from tests.fakes.reference import reference_model
from tests.fakes.thread_group import ThreadGroup, run_ranks
from tests.model_shards.families.logits import (
    TOKENS,
    TOLERANCE,
    Judged,
    Variants,
    reference_logits,
    sharded_logits,
)

VARIANTS: Variants = {
    "llama": ("llama", {}),
    "llama, 9 heads over 3": ("llama", {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 144}),
    "llama, one KV head": ("llama", {"num_key_value_heads": 1}),
    "llama, no grouping": ("llama", {"num_key_value_heads": 6}),
    "llama, 5 heads": ("llama", {"num_attention_heads": 5, "num_key_value_heads": 5, "hidden_size": 80}),
    "llama, odd FFN": ("llama", {"intermediate_size": 67}),
    "llama, head size by default": ("llama", {"head_dim": ...}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, rope parameters": (
        "llama",
        {"rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ),
    "mistral": ("mistral", {}),
    "mistral, sliding window": ("mistral", {"sliding_window": 5}),
    "mistral, window of 1": ("mistral", {"sliding_window": 1, "num_key_value_heads": 1}),
    "qwen2": ("qwen2", {"head_dim": ...}),
    "qwen2, tied": ("qwen2", {"head_dim": ..., "tie_word_embeddings": True}),
    "qwen2, sliding window in one layer": (
        "qwen2",
        {"head_dim": ..., "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3, biases": ("qwen3", {"attention_bias": True}),
}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_greedy_tokens_equal_transformers(
    judged: Callable[[str], Judged], name: str, ranks: int
) -> None:
    judged(name).check(ranks)


@pytest.mark.parametrize("flag", [False, True, ...])
@pytest.mark.parametrize("head", ["absent", "a copy", "its own"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_head_that_is_in_the_files_is_used(tmp_path: Path, flag: Any, head: str, ranks: int) -> None:
    """Case 31: tied without a head, tied with a redundant one, untied, and no flag at all."""
    config = json.loads((write_tiny_model(tmp_path, "llama") / "config.json").read_text())
    weights = tiny_weights(config, seed=1)
    if head == "absent":
        del weights["lm_head.weight"]
    elif head == "a copy":
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    config["tie_word_embeddings"] = flag
    if flag is ...:
        del config["tie_word_embeddings"]
    write_folder(tmp_path, config, weights)
    if flag is False and head == "absent":
        with pytest.raises(ValueError, match=r"has no tensor 'lm_head\.weight'"):
            sharded_logits(tmp_path, ranks, TOKENS)
        return
    # The reference gets the head by hand: transformers would draw a random one where the flag is missing.
    effective = weights["model.embed_tokens.weight"] if head == "absent" else weights["lm_head.weight"]
    write_folder(
        tmp_path / "reference",
        {**config, "tie_word_embeddings": False},
        {**weights, "lm_head.weight": effective.clone()},
    )
    expected = reference_logits(reference_model(tmp_path / "reference"), TOKENS)
    torch.testing.assert_close(sharded_logits(tmp_path, ranks, TOKENS), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("quantisation", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_gguf_logits_equal_transformers_on_the_same_numbers(tmp_path: Path, quantisation: str, ranks: int) -> None:
    assert_gguf_matches(tmp_path, "llama", quantisation, ranks, tie_word_embeddings=ranks == 2)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("quantisation", ["F32", "Q8_0"])
def test_gguf_families(tmp_path: Path, family: str, quantisation: str) -> None:
    assert_gguf_matches(tmp_path, family, quantisation, 2)


def assert_gguf_matches(tmp_path: Path, family: str, quantisation: str, ranks: int, **overrides: Any) -> None:
    folder = write_tiny_model(tmp_path / "folder", family, **overrides)
    config = json.loads((folder / "config.json").read_text())
    weights = tiny_weights(config, seed=0)
    stored = write_gguf(tmp_path / "m.gguf", config, weights, gguf.GGMLQuantizationType[quantisation])
    reference = reference_model(folder)
    reference.load_state_dict(stored, strict=False)
    logits = sharded_logits(tmp_path / "m.gguf", ranks, TOKENS)
    torch.testing.assert_close(logits, reference_logits(reference, TOKENS), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("packed", [True, False])
def test_a_token_has_the_same_bits_in_any_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    """With packed weights and with the fall-back to `F.linear`, for every part but the attention kernel."""
    if not packed:
        monkeypatch.setattr(linear, "packing_works", lambda out_features, in_features: False)
    folder = write_tiny_model(tmp_path, "llama", intermediate_size=67)

    def work(group: ThreadGroup) -> tuple[Tensor, Tensor]:
        model = load_model(folder, group, device=torch.device("cpu"), dtype=torch.float32)
        positions = torch.arange(len(TOKENS))
        whole = model.local_logits(model.forward(TOKENS, positions, _ValuesOnly()))
        single = [
            model.local_logits(model.forward(TOKENS[i : i + 1], positions[i : i + 1], _ValuesOnly()))
            for i in range(len(TOKENS))
        ]
        return whole, torch.cat(single)

    for whole, single in run_ranks(2, work):
        assert torch.equal(whole, single)


class _ValuesOnly:
    """Attention of each token to itself: what is left of a layer is what this package computes."""

    def attend(
        self, layer: int, heads: Tensor, value: Tensor, rotation: Rotation | None, window: int | None
    ) -> Tensor:
        query, key = query_and_key(heads, value, rotation)
        ratio = query.shape[1] // key.shape[1]
        return (value + key).repeat_interleave(ratio, dim=1) + query


def test_one_copy_of_a_tied_weight_where_it_is_not_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "packing_works", lambda out_features, in_features: False)
    folder = write_tiny_model(tmp_path, "llama", tie_word_embeddings=True)
    [model] = run_ranks(
        1, lambda group: load_model(folder, group, device=torch.device("cpu"), dtype=torch.float32)
    )
    assert model.head.weight is model.embedding.weight


def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "llama")

    def work(group: ThreadGroup) -> Tensor:
        model = load_model(folder, group, device=torch.device("cpu"), dtype=torch.bfloat16)
        return model.local_logits(model.forward(TOKENS, torch.arange(len(TOKENS)), PlainAttention()))

    logits = torch.cat(run_ranks(2, work), dim=1)
    assert logits.dtype == torch.float32
    error = (logits - sharded_logits(folder, 1, TOKENS)).abs().max()
    assert 0 < error < 0.2
