"""Mixtures of experts against `transformers`; and a token's result is its own, whatever else its experts get."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from model_shards.families.decoder import Decoder
from model_shards.layers import linear
from model_shards.layers.experts import route
from model_shards.layers.placement import Placement
from model_shards.partition import partition_model
from model_shards.weights.loader import load_model
from model_shards.weights.metadata import read_spec
from tests.fakes.checkpoints import write_tiny_model
from tests.fakes.thread_group import ThreadGroup, run_ranks
from tests.model_shards.families.logits import (
    Judged,
    Variants,
)

VARIANTS: Variants = {
    "mixtral": ("mixtral", {}),
    "mixtral, one KV head, tied": ("mixtral", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "mixtral, sliding window": ("mixtral", {"sliding_window": 4}),
    "mixtral, odd experts": ("mixtral", {"intermediate_size": 37, "num_local_experts": 3}),
    "mixtral, one expert a token": ("mixtral", {"num_experts_per_tok": 1}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe, weights as they come": ("qwen3_moe", {"norm_topk_prob": False, "head_dim": 32}),
    "qwen3_moe, biases, 9 heads over 3": (
        "qwen3_moe",
        {"attention_bias": True, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 144},
    ),
    "qwen3_moe, sliding window": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 4}),
    "qwen3_moe, all experts": ("qwen3_moe", {"num_experts_per_tok": 5}),
}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_greedy_tokens_equal_transformers(
    judged: Callable[[str], Judged], name: str, ranks: int
) -> None:
    judged(name).check(ranks)


def test_equal_experts_are_chosen_by_id() -> None:
    logits = torch.tensor([[1.0, 3.0, 1.0, 3.0, 1.0], [0.0, 0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0, 9.0]])
    weights, experts = route(logits, 3, normalise=True)
    assert experts.tolist() == [[1, 3, 0], [0, 1, 2], [4, 0, 1]]
    torch.testing.assert_close(weights.sum(1), torch.ones(3))
    probabilities, _ = route(logits, 3, normalise=False)
    torch.testing.assert_close(probabilities, logits.softmax(1).gather(1, experts))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_a_token_has_the_same_bits_in_any_company(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, packed: bool
) -> None:
    """Alone, each expert has one row; together, as many as the router likes."""
    if not packed:
        monkeypatch.setattr(linear, "packing_works", lambda out_features, in_features: False)
    size = {"mixtral": "intermediate_size", "qwen3_moe": "moe_intermediate_size"}[family]
    folder = write_tiny_model(tmp_path, family, **{size: 37})
    source = torch.Generator().manual_seed(0)
    hidden = torch.randn(64, 96, generator=source)

    def work(group: ThreadGroup) -> None:
        model = load_model(folder, group, device=torch.device("cpu"), dtype=torch.float32)
        mixture = model.get_submodule("layers.1.mlp")
        whole = mixture(hidden)
        assert whole.abs().max() > 0.1
        shuffled = torch.randperm(64, generator=torch.Generator().manual_seed(1))
        start = 0
        for count in (1, 1, 2, 3, 4, 5, 17, 31):
            rows = shuffled[start : start + count]
            assert torch.equal(mixture(hidden[rows]), whole[rows])
            start += count

    run_ranks(2, work)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_layout_and_module_agree_on_every_parameter(tmp_path: Path, family: str, ranks: int) -> None:
    spec = read_spec(write_tiny_model(tmp_path, family))
    sizes = []
    for group in ThreadGroup.of(ranks):
        model = Decoder(spec, Placement(group, torch.device("cpu"), torch.float32))
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        assert shapes == {name: layout.local_shape(group.rank) for name, layout in model.layout.items()}
        sizes.append(sum(layout.local_size(group.rank) for layout in model.layout.values()))
    columns = [span.size for span in partition_model(spec, ranks).ffn_columns]
    assert sum(columns) == 40
    assert max(sizes) < 1.15 * min(sizes)  # a column is in 15 matrices
