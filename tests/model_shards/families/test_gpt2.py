"""GPT-2 against `transformers`: fused and transposed matrices, learned positions, heads that no ranks divide."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from model_shards.errors import CheckpointError
from model_shards.families.gpt2 import Gpt2
from model_shards.families.gpt2_layout import gpt2_layout
from model_shards.layers.placement import Placement
from model_shards.layers.rotary import Rotation
from model_shards.partition import partition_model
from model_shards.spec import ModelSpec
from model_shards.weights.loader import load_model
from model_shards.weights.metadata import read_spec
from tests.fakes.checkpoints import tiny_weights, write_folder, write_tiny_model
from tests.fakes.plain_attention import query_and_key
from tests.fakes.thread_group import ThreadGroup, run_ranks
from tests.model_shards.families.logits import (
    TOKENS,
    TOLERANCE,
    Judged,
    Variants,
    sharded_logits,
)

GPT2_XL = ModelSpec(
    architecture="gpt2",
    vocab_size=50257,
    hidden_size=1600,
    num_layers=2,  # of 48
    num_query_heads=25,
    num_kv_heads=25,
    head_dim=64,
    intermediate_size=6400,
    max_positions=1024,
    norm_epsilon=1e-5,
    rope_theta=None,
    tied_embeddings=True,
    qkv_bias=True,
    output_bias=True,
    mlp_bias=True,
)
VARIANTS: Variants = {
    "gpt2": ("gpt2", {}),
    "5 heads": ("gpt2", {"n_head": 5, "n_embd": 80}),
    "25 heads of odd size": ("gpt2", {"n_head": 25, "n_embd": 75}),
    "odd FFN": ("gpt2", {"n_inner": 67}),
    "untied": ("gpt2", {"tie_word_embeddings": False}),
}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_greedy_tokens_equal_transformers(
    judged: Callable[[str], Judged], name: str, ranks: int
) -> None:
    judged(name).check(ranks)


@pytest.mark.parametrize("head", ["absent", "a copy"])
def test_names_without_a_prefix_and_old_buffers(
    judged: Callable[[str], Judged], tmp_path: Path, head: str
) -> None:
    """As in the first files of this family, which also hold the causal mask."""
    plain = judged("gpt2")
    config = json.loads((plain.folder / "config.json").read_text())
    weights = {name.removeprefix("transformer."): tensor for name, tensor in tiny_weights(config, seed=0).items()}
    for layer in range(2):
        weights[f"h.{layer}.attn.bias"] = torch.ones(512, 512).tril().view(1, 1, 512, 512)
        weights[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    if head == "a copy":
        weights["lm_head.weight"] = weights["wte.weight"].clone()
    write_folder(tmp_path, config, weights)
    torch.testing.assert_close(sharded_logits(tmp_path, 2, TOKENS), plain.logits, rtol=0, atol=TOLERANCE)


def test_a_fused_tensor_of_another_size_is_named(tmp_path: Path) -> None:
    config = json.loads((write_tiny_model(tmp_path, "gpt2") / "config.json").read_text())
    weights = tiny_weights(config, seed=0)
    weights["transformer.h.1.attn.c_attn.weight"] = torch.zeros(96, 3 * 96 + 1)
    write_folder(tmp_path, config, weights)
    with pytest.raises(CheckpointError, match=r"'layers\.1\.attention\.query\.weight' has shape \[289, 96\], but"):
        sharded_logits(tmp_path, 1, TOKENS)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("tied", [False, True])
def test_layout_and_module_agree_on_every_parameter(tmp_path: Path, ranks: int, tied: bool) -> None:
    spec = read_spec(write_tiny_model(tmp_path, "gpt2", n_head=5, n_embd=80, tie_word_embeddings=tied))
    for group in ThreadGroup.of(ranks):
        model = Gpt2(spec, Placement(group, torch.device("cpu"), torch.float32))
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        assert shapes == {name: layout.local_shape(group.rank) for name, layout in model.layout.items()}


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_the_largest_one_is_cut_evenly(ranks: int) -> None:
    """Case 27: 25 heads and 50,257 tokens over ranks that divide neither."""
    partition = partition_model(GPT2_XL, ranks)
    if ranks == 2:
        assert [span.size for span in partition.query_heads] == [13, 12]
    assert sum(span.size for span in partition.vocabulary) == 50257
    layout = gpt2_layout(GPT2_XL, partition)
    weights = [sum(parameter.local_size(rank) for parameter in layout.values()) for rank in range(ranks)]
    assert max(weights) < 1.05 * min(weights)


def test_a_token_has_the_same_bits_in_any_chunk(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "gpt2", n_inner=67)

    class ValuesOnly:
        """Attention of each token to itself."""

        def attend(
            self, layer: int, heads: Tensor, value: Tensor, rotation: Rotation | None, window: int | None
        ) -> Tensor:
            query, key = query_and_key(heads, value, rotation)
            return query + key + value

    def work(group: ThreadGroup) -> tuple[Tensor, Tensor]:
        model = load_model(folder, group, device=torch.device("cpu"), dtype=torch.float32)
        positions = torch.arange(len(TOKENS))
        whole = model.local_logits(model.forward(TOKENS, positions, ValuesOnly()))
        parts = [slice(0, 1), slice(1, 4), slice(4, 12)]
        cut = [model.local_logits(model.forward(TOKENS[part], positions[part], ValuesOnly())) for part in parts]
        return whole, torch.cat(cut)

    for whole, cut in run_ranks(2, work):
        assert torch.equal(whole, cut)
