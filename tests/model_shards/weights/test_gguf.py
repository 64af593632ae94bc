"""Any range of a GGUF tensor equals that range of the whole, whatever blocks it cuts through."""

from pathlib import Path

import gguf
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from model_shards.errors import CheckpointError
from model_shards.partition import Span
from model_shards.weights.gguf import GgufCheckpoint
from model_shards.weights.gguf_header import GgufHeader
from tests.fakes.gguf_files import write_gguf

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "max_position_embeddings": 64,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 11,
    "rope_theta": 1e4,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}
Opened = tuple[GgufCheckpoint, dict[str, Tensor]]  # and the weights that the file was made of
LAYER = "model.layers.0"


@pytest.fixture(scope="module", params=["F32", "Q8_0", "Q4_1", "Q5_0"])
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    generator = torch.Generator().manual_seed(0)
    weights = {
        f"{LAYER}.self_attn.q_proj.weight": torch.randn(96, 96, generator=generator),
        f"{LAYER}.self_attn.k_proj.weight": torch.randn(32, 96, generator=generator),
        f"{LAYER}.self_attn.k_proj.bias": torch.randn(32, generator=generator),
        f"{LAYER}.mlp.down_proj.weight": torch.randn(96, 160, generator=generator),
        f"{LAYER}.input_layernorm.weight": torch.randn(96, generator=generator),
    }
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    stored = write_gguf(path, CONFIG, weights, gguf.GGMLQuantizationType[request.param])
    return GgufCheckpoint(GgufHeader(path), head_dim=16), stored


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    rows=st.sets(st.integers(0, 96), min_size=2, max_size=2),
    columns=st.sets(st.integers(0, 160), min_size=2, max_size=2),
)
def test_any_range_of_a_matrix(opened: Opened, rows: set[int], columns: set[int]) -> None:
    checkpoint, stored = opened
    row, column = Span(*sorted(rows)), Span(*sorted(columns))
    part = checkpoint.read("layers.0.mlp.down.weight", (row, column))
    whole = stored[f"{LAYER}.mlp.down_proj.weight"]
    assert torch.equal(part.float(), whole[row.start : row.stop, column.start : column.stop])


def test_query_and_key_rows_come_in_the_order_of_the_model(
    opened: Opened,
) -> None:
    checkpoint, stored = opened
    query = checkpoint.read("layers.0.attention.query.weight", (Span(32, 80), Span(0, 96)))
    assert torch.equal(query.float(), stored[f"{LAYER}.self_attn.q_proj.weight"][32:80])
    key = checkpoint.read("layers.0.attention.key.weight", (Span(16, 32), Span(0, 96)))
    assert torch.equal(key.float(), stored[f"{LAYER}.self_attn.k_proj.weight"][16:32])
    bias = checkpoint.read("layers.0.attention.key.bias", (Span(16, 32),))
    assert torch.equal(bias, stored[f"{LAYER}.self_attn.k_proj.bias"][16:32])


def test_shapes_and_vectors(opened: Opened) -> None:
    checkpoint, stored = opened
    assert checkpoint.shape_of("layers.0.mlp.down.weight") == (96, 160)
    norm = checkpoint.read("layers.0.attention_norm.weight", (Span(5, 90),))
    assert torch.equal(norm, stored[f"{LAYER}.input_layernorm.weight"][5:90])


def test_tensors_must_be_those_of_the_model(opened: Opened) -> None:
    checkpoint, _ = opened
    held = [
        "layers.0.attention.query.weight",
        "layers.0.attention.key.weight",
        "layers.0.attention.key.bias",
        "layers.0.mlp.down.weight",
        "layers.0.attention_norm.weight",
    ]
    checkpoint.check(held)
    with pytest.raises(CheckpointError, match=r"model\.gguf: has no tensor 'blk\.0\.ffn_up\.weight' \(layers"):
        checkpoint.check([*held, "layers.0.mlp.up.weight"])
    with pytest.raises(CheckpointError, match=r"tensor 'blk\.0\.attn_k\.bias' has no place"):
        checkpoint.check([tensor for tensor in held if not tensor.endswith("bias")])
    with pytest.raises(CheckpointError, match=r"has no tensor 'output_norm\.weight'"):
        checkpoint.read("norm.weight", (Span(0, 1),))


def test_a_closed_checkpoint_says_so(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", CONFIG, {"model.norm.weight": torch.ones(96)})
    checkpoint = GgufCheckpoint(GgufHeader(tmp_path / "m.gguf"), head_dim=16)
    checkpoint.close()
    checkpoint.close()
    with pytest.raises(CheckpointError, match="closed"):
        checkpoint.read("norm.weight", (Span(0, 96),))
