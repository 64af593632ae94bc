"""From GPT-2's `config.json`, which has words of its own, to a `ModelSpec`. Torch-free."""

from collections.abc import Mapping

from model_shards.errors import UnsupportedModel
from model_shards.spec import ModelSpec
from model_shards.weights.fields import Fields

# Settings that change the arithmetic, each with the only values that we run. `reorder_and_upcast_attn` is not one
# of them: attention is computed in float32 here whatever it says.
GPT2_ONLY_VALUES: Mapping[str, tuple[object, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "quantization_config": (None,),
}


def gpt2_spec(config: Fields, *, tied_embeddings: bool, eos_token_ids: tuple[int, ...]) -> ModelSpec:
    heads, hidden = config.integer("n_head"), config.integer("n_embd")
    if hidden % max(heads, 1):
        raise UnsupportedModel(f"{config.file}: n_embd {hidden} does not divide over {heads} heads")
    return ModelSpec(
        architecture="gpt2",
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        num_layers=config.integer("n_layer"),
        num_query_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // max(heads, 1),
        intermediate_size=config.integer("n_inner", 4 * hidden),
        max_positions=config.integer("n_positions"),
        norm_epsilon=config.number("layer_norm_epsilon", 1e-5),
        rope_theta=None,
        tied_embeddings=tied_embeddings,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        bos_token_id=config.optional_integer("bos_token_id"),
        eos_token_ids=eos_token_ids,
    )
