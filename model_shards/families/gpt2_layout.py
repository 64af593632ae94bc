"""Every parameter of GPT-2: which checkpoint tensors it is made of, and how each is cut.

That the files hold query, key and value as one tensor, and matrices the other way round, is theirs to know
(`weights.names`). Knows names and cuts; knows nothing of files or torch.
"""

from model_shards.families.decoder_layout import attention_layout
from model_shards.partition import ModelLayout, ModelPartition, ParameterLayout
from model_shards.spec import ModelSpec

_cut, _whole = ParameterLayout.cut, ParameterLayout.whole


def gpt2_layout(spec: ModelSpec, partition: ModelPartition) -> ModelLayout:
    """Parameter name -> layout, in the order of the model."""
    hidden, ffn, ranks = spec.hidden_size, spec.intermediate_size, partition.num_ranks
    vocabulary = ((spec.vocab_size, hidden), partition.vocabulary)

    def norm(name: str) -> dict[str, ParameterLayout]:
        return {f"{name}.{leaf}": _whole(f"{name}.{leaf}", (hidden,), ranks) for leaf in ("weight", "bias")}

    layout = {
        "embedding.weight": _cut("embedding.weight", *vocabulary),
        "positions.weight": _whole("positions.weight", (spec.max_positions, hidden), ranks),
    }
    for index in range(spec.num_layers):
        layer = f"layers.{index}"
        mlp = f"{layer}.mlp"
        layout |= norm(f"{layer}.attention_norm")
        layout |= attention_layout(spec, partition, f"{layer}.attention")
        layout |= norm(f"{layer}.mlp_norm")
        layout |= {
            f"{mlp}.up.weight": _cut(f"{mlp}.up.weight", (ffn, hidden), partition.ffn_columns),
            f"{mlp}.up.bias": _cut(f"{mlp}.up.bias", (ffn,), partition.ffn_columns),
            f"{mlp}.down.shard.weight": _cut(f"{mlp}.down.weight", (hidden, ffn), partition.ffn_columns, axis=1),
            f"{mlp}.down.bias": _whole(f"{mlp}.down.bias", (hidden,), ranks),
        }
    layout |= norm("norm")
    if not spec.tied_embeddings:
        layout["head.weight"] = _cut("head.weight", *vocabulary)
    return layout
