"""What a config or a GGUF header says becomes a spec; what we do not run is refused by name."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from model_shards.errors import CheckpointError, UnsupportedModel
from model_shards.spec import ModelSpec
from model_shards.weights.metadata import read_spec

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 160,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "use_sliding_window": True,
    "sliding_window": 128,
}


def spec_of(folder: Path, config: dict[str, Any] | None = None, **overrides: Any) -> ModelSpec:
    merged = {**LLAMA, **(config or {}), **overrides}
    text = json.dumps({key: value for key, value in merged.items() if value is not ...})
    (folder / "config.json").write_text(text)
    return read_spec(folder)


def test_a_llama_config(tmp_path: Path) -> None:
    assert spec_of(tmp_path, rope_theta=500_000.0) == ModelSpec(
        architecture="llama",
        vocab_size=1000,
        hidden_size=96,
        num_layers=2,
        num_query_heads=6,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=160,
        max_positions=512,
        norm_epsilon=1e-5,
        rope_theta=500_000.0,
        tied_embeddings=False,
        bos_token_id=1,
        eos_token_ids=(2,),
    )


def test_families_differ_in_flags(tmp_path: Path) -> None:
    qwen2 = spec_of(tmp_path, architectures=["Qwen2ForCausalLM"], tie_word_embeddings=True)
    assert (qwen2.architecture, qwen2.tied_embeddings) == ("qwen2", True)
    assert (qwen2.qkv_bias, qwen2.output_bias) == (True, False)
    qwen3 = spec_of(tmp_path, architectures=["Qwen3ForCausalLM"], head_dim=32)
    assert (qwen3.query_key_norm, qwen3.qkv_bias, qwen3.head_dim) == (True, False, 32)
    biased = spec_of(tmp_path, attention_bias=True, mlp_bias=True)
    assert (biased.qkv_bias, biased.output_bias, biased.mlp_bias) == (True, True, True)
    by_type = spec_of(tmp_path, architectures=..., model_type="mistral", sliding_window=None)
    assert by_type.architecture == "mistral"


MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
    },
}


def test_mixtures_of_experts(tmp_path: Path) -> None:
    mixtral = spec_of(tmp_path, MIXTURES["mixtral"], rms_norm_eps=...)
    assert (mixtral.num_experts, mixtral.experts_per_token, mixtral.intermediate_size) == (4, 2, 160)
    assert (mixtral.normalised_routing, mixtral.query_key_norm, mixtral.windows) == (True, False, ())
    assert (mixtral.rope_theta, mixtral.norm_epsilon) == (1e6, 1e-5)
    qwen = spec_of(tmp_path, MIXTURES["qwen3_moe"], decoder_sparse_step=1, mlp_only_layers=[])
    assert (qwen.num_experts, qwen.experts_per_token, qwen.intermediate_size) == (6, 3, 40)
    assert (qwen.normalised_routing, qwen.query_key_norm, qwen.rope_theta) == (False, True, 10_000.0)
    renamed = spec_of(tmp_path, MIXTURES["qwen3_moe"], num_experts=..., num_local_experts=6, norm_topk_prob=True)
    assert (renamed.num_experts, renamed.normalised_routing) == (6, True)


@pytest.mark.parametrize(
    ("family", "overrides", "message"),
    [
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers = \[0\]"),
        ("qwen3_moe", {"num_experts_per_tok": 7}, "7 of 6 experts for each token"),
        ("mixtral", {"num_experts_per_tok": 0}, "0 of 4 experts for each token"),
        ("mixtral", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ],
)
def test_what_we_do_not_run_of_a_mixture_is_refused(
    tmp_path: Path, family: str, overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        spec_of(tmp_path, MIXTURES[family], **overrides)


def test_experts_in_a_family_that_has_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="num_local_experts = 8"):
        spec_of(tmp_path, num_local_experts=8)


def test_absent_keys_have_the_defaults_of_the_format(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, num_key_value_heads=..., eos_token_id=..., bos_token_id=None)
    assert (spec.num_kv_heads, spec.rope_theta, spec.eos_token_ids, spec.bos_token_id) == (6, 10_000.0, (), None)


@pytest.mark.parametrize(
    "overrides",
    [
        {"rope_theta": 7.0},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}},
        {"rope_theta": 7.0, "rope_scaling": None},
        {"rope_theta": 7.0, "rope_scaling": {"type": "default"}},
    ],
)
def test_rope_theta_old_and_new(tmp_path: Path, overrides: dict[str, Any]) -> None:
    assert spec_of(tmp_path, overrides).rope_theta == 7.0


def test_generation_config_has_the_first_word_on_the_end(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert spec_of(tmp_path).eos_token_ids == (7, 9)
    (tmp_path / "generation_config.json").write_text("{}")
    assert spec_of(tmp_path).eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"architectures": ["GemmaForCausalLM"]},
            "'GemmaForCausalLM' is not supported; we run Llama",
        ),
        ({"architectures": ..., "model_type": "t5"}, "architecture 't5'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 8.0}}, "rope_scaling of type 'longrope'"),
        ({"rope_parameters": {"rope_type": ["yarn"], "rope_theta": 1e4}}, "rope_parameters of type"),
        ({"rope_scaling": "linear"}, "rope_scaling = 'linear'"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "rope_scaling.factor is 0.5; it must be at least 1"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 3}}, "rope_scaling.beta_fast is not"),
        ({"rope_scaling": {"type": "default", "mrope_section": [1, 2]}}, "rope_scaling.mrope_section is not"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 1}},
            "low_freq_factor 4 is not below high_freq_factor 1",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
            "rope_parameters that differ",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config = {'quant_method': 'awq'}"),
        ({"use_sliding_window": True, "sliding_window": 128}, "use_sliding_window is not supported for llama"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({**QWEN2, "layer_types": ["full_attention", "chunked_attention"]}, "layer_types = .*chunked"),
        ({**QWEN2, "layer_types": ["sliding_attention"]}, "1 layer_types for 2 layers"),
        ({**QWEN2, "layer_types": ["sliding_attention"] * 2, "use_sliding_window": False}, "is not set"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "the attention window is 0"),
        ({"num_attention_heads": 5}, "5 query heads do not divide over 2 KV heads"),
        ({"head_dim": 15}, "head_dim is 15"),
    ],
)
def test_what_we_do_not_run_is_refused_by_name(tmp_path: Path, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message.replace("{", r"\{")):
        spec_of(tmp_path, overrides)


@pytest.mark.parametrize(
    ("overrides", "windows"),
    [
        ({"sliding_window": 128}, (128, 128)),
        ({"sliding_window": 512}, ()),  # as wide as the context: changes nothing
        ({"sliding_window": None}, ()),
        ({"max_position_embeddings": 8192}, (4096, 4096)),  # what an absent key means for this family
        ({**QWEN2}, ()),  # by default only the layers from 28 on
        ({**QWEN2, "max_window_layers": 1}, (None, 128)),
        ({**QWEN2, "max_window_layers": 0}, (128, 128)),
        ({**QWEN2, "max_window_layers": 0, "use_sliding_window": False}, ()),
        ({**QWEN2, "layer_types": ["sliding_attention", "full_attention"]}, (128, None)),
        ({**QWEN2, "architectures": ["Qwen3ForCausalLM"], "max_window_layers": 1}, (None, 128)),
        ({**QWEN2, "architectures": ["Qwen3MoeForCausalLM"]}, (128, 128)),
        ({"architectures": ["Qwen3MoeForCausalLM"], "sliding_window": 128}, ()),
        ({"architectures": ["MixtralForCausalLM"], "sliding_window": 128}, (128, 128)),
        ({"architectures": ["MixtralForCausalLM"], "max_position_embeddings": 8192}, ()),
    ],
)
def test_windows_of_layers(tmp_path: Path, overrides: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    spec = spec_of(tmp_path, {"architectures": ["MistralForCausalLM"], **overrides})
    assert spec.windows == windows


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"vocab_size": "many"}, "vocab_size is 'many', not an integer"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True, not an integer"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small', not a number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes', not true or false"),
        ({"eos_token_id": ["</s>"]}, "eos_token_id is"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "yarn", "factor": "4"}}, "factor is '4', not a number"),
    ],
)
def test_a_config_of_wrong_types_is_refused(tmp_path: Path, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        spec_of(tmp_path, overrides)


GPT2: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 50257,
    "n_embd": 1600,
    "n_layer": 48,
    "n_head": 25,
    "n_positions": 1024,
    "bos_token_id": 50256,
    "eos_token_id": 50256,
}


def gpt2_spec_of(folder: Path, **overrides: Any) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps({**GPT2, **overrides}))
    return read_spec(folder)


def test_a_gpt2_config(tmp_path: Path) -> None:
    assert gpt2_spec_of(tmp_path) == ModelSpec(
        architecture="gpt2",
        vocab_size=50257,
        hidden_size=1600,
        num_layers=48,
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
        bos_token_id=50256,
        eos_token_ids=(50256,),
    )
    other = gpt2_spec_of(tmp_path, n_inner=100, tie_word_embeddings=False, reorder_and_upcast_attn=True)
    assert (other.intermediate_size, other.tied_embeddings) == (100, False)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"activation_function": "relu"}, "activation_function = 'relu'"),
        ({"scale_attn_weights": False}, "scale_attn_weights = False"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True"),
        ({"add_cross_attention": True}, "add_cross_attention = True"),
        ({"n_head": 24}, "n_embd 1600 does not divide over 24 heads"),
    ],
)
def test_what_we_do_not_run_of_gpt2_is_refused(tmp_path: Path, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        gpt2_spec_of(tmp_path, **overrides)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_broken_config_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_spec(tmp_path)


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read"):
        read_spec(tmp_path)


def write_header(path: Path, architecture: str = "llama", tensors: tuple[str, ...] = (), **fields: Any) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    own = {
        "block_count": 1,
        "context_length": 64,
        "embedding_length": 8,
        "feed_forward_length": 16,
        "attention.head_count": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        **fields,
    }
    for key, value in own.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
        add[type(value)](f"{architecture}.{key}", value)  # type: ignore[operator]
    writer.add_eos_token_id(3)
    writer.add_eot_token_id(4)
    for name in ("token_embd.weight", *tensors):
        writer.add_tensor(name, torch.zeros(11, 8).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_header(tmp_path: Path) -> None:
    spec = read_spec(write_header(tmp_path / "m.gguf"))
    assert (spec.vocab_size, spec.head_dim, spec.num_kv_heads, spec.rope_theta) == (11, 4, 2, 10_000.0)
    assert (spec.tied_embeddings, spec.eos_token_ids, spec.bos_token_id) == (True, (3, 4), None)
    assert not read_spec(write_header(tmp_path / "untied.gguf", tensors=("output.weight",))).tied_embeddings


@pytest.mark.parametrize(
    ("architecture", "tensors", "fields", "message"),
    [
        ("gpt2", (), {}, "general.architecture is 'gpt2'"),
        ("gemma", (), {}, "general.architecture is 'gemma'; from GGUF we run llama"),
        ("llama", (), {"rope.scaling.type": "yarn"}, "rope.scaling.type = 'yarn'"),
        ("llama", (), {"expert_count": 8}, "expert_count = 8"),
        ("llama", (), {"rope.dimension_count": 2}, "rope.dimension_count differs from the head size 4"),
        ("llama", (), {"attention.value_length": 8}, "attention.value_length differs from the head size 4"),
        ("llama", (), {"logit_scale": 2.0}, "logit_scale = 2.0"),
        ("qwen2", (), {"attention.sliding_window": 16}, "qwen2.attention.sliding_window"),
        ("llama", (), {"feed_forward_length": [16, 32]}, "llama.feed_forward_length differs between layers"),
    ],
)
def test_gguf_settings_that_we_do_not_run_are_refused(
    tmp_path: Path, architecture: str, tensors: tuple[str, ...], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        read_spec(write_header(tmp_path / "m.gguf", architecture, tensors, **fields))


def test_rope_divisors_of_another_size_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'rope_freqs\.weight' is not 2 divisors"):
        read_spec(write_header(tmp_path / "m.gguf", tensors=("rope_freqs.weight",)))


def test_a_gguf_field_that_is_missing_is_named(tmp_path: Path) -> None:
    path = write_header(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes().replace(b"llama.block_count", b"llama.block_conut"))
    with pytest.raises(CheckpointError, match="block_count is missing"):
        read_spec(path)
