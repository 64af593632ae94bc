"""Every parameter of the decoder: which checkpoint tensors it is made of, and how each is cut.

The one declaration that construction, loading and planning share. Fused parameters (query, key and value; gate and
up) are several tensors stacked. Knows names and cuts; knows nothing of files or torch.
"""

from model_shards.partition import ModelLayout, ModelPartition, ParameterLayout
from model_shards.spec import ModelSpec

_cut, _whole, _stacked = ParameterLayout.cut, ParameterLayout.whole, ParameterLayout.stacked


def decoder_layout(spec: ModelSpec, partition: ModelPartition) -> ModelLayout:
    """Parameter name -> layout, in the order of the model."""
    vocabulary = ((spec.vocab_size, spec.hidden_size), partition.vocabulary)
    layout = {"embedding.weight": _cut("embedding.weight", *vocabulary)}
    for index in range(spec.num_layers):
        layer = f"layers.{index}"
        for name in ("attention_norm.weight", "mlp_norm.weight"):
            layout[f"{layer}.{name}"] = _whole(f"{layer}.{name}", (spec.hidden_size,), partition.num_ranks)
        layout |= attention_layout(spec, partition, f"{layer}.attention")
        feed_forward = _experts_layout if spec.num_experts else _mlp_layout
        layout |= feed_forward(spec, partition, f"{layer}.mlp")
    layout["norm.weight"] = _whole("norm.weight", (spec.hidden_size,), partition.num_ranks)
    if not spec.tied_embeddings:
        layout["head.weight"] = _cut("head.weight", *vocabulary)
    return layout


def attention_layout(spec: ModelSpec, partition: ModelPartition, attention: str) -> dict[str, ParameterLayout]:
    """Of one layer, whose parameters and tensors are called `attention`.(...)."""
    hidden, ranks = spec.hidden_size, partition.num_ranks
    query_rows = tuple(span.scaled(spec.head_dim) for span in partition.query_heads)
    kv_rows = tuple(span.scaled(spec.head_dim) for span in partition.kv_heads)
    query_size, kv_size = spec.num_query_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    cuts = {"query": (query_size, query_rows), "key": (kv_size, kv_rows), "value": (kv_size, kv_rows)}
    parts = {
        f"{attention}.qkv.weight": _stacked(
            *(_cut(f"{attention}.{name}.weight", (size, hidden), rows) for name, (size, rows) in cuts.items())
        ),
        f"{attention}.output.shard.weight": _cut(
            f"{attention}.output.weight", (hidden, query_size), query_rows, axis=1
        ),
    }
    if spec.qkv_bias:
        parts[f"{attention}.qkv.bias"] = _stacked(
            *(_cut(f"{attention}.{name}.bias", (size,), rows) for name, (size, rows) in cuts.items())
        )
    if spec.output_bias:  # added once, after the all-reduce, by every rank alike
        parts[f"{attention}.output.bias"] = _whole(f"{attention}.output.bias", (hidden,), ranks)
    if spec.query_key_norm:
        for norm in (f"{attention}.query_norm.weight", f"{attention}.key_norm.weight"):
            parts[norm] = _whole(norm, (spec.head_dim,), ranks)
    return parts


def _mlp_layout(spec: ModelSpec, partition: ModelPartition, mlp: str) -> dict[str, ParameterLayout]:
    hidden, ffn, columns = spec.hidden_size, spec.intermediate_size, partition.ffn_columns
    parts = {
        f"{mlp}.gate_up.weight": _stacked(
            *(_cut(f"{mlp}.{name}.weight", (ffn, hidden), columns) for name in ("gate", "up"))
        ),
        f"{mlp}.down.shard.weight": _cut(f"{mlp}.down.weight", (hidden, ffn), columns, axis=1),
    }
    if spec.mlp_bias:
        parts[f"{mlp}.gate_up.bias"] = _stacked(
            *(_cut(f"{mlp}.{name}.bias", (ffn,), columns) for name in ("gate", "up"))
        )
        parts[f"{mlp}.down.bias"] = _whole(f"{mlp}.down.bias", (hidden,), partition.num_ranks)
    return parts


def _experts_layout(spec: ModelSpec, partition: ModelPartition, mlp: str) -> dict[str, ParameterLayout]:
    hidden, ffn, columns = spec.hidden_size, spec.intermediate_size, partition.ffn_columns
    router = f"{mlp}.router.weight"
    parts = {router: _whole(router, (spec.num_experts, hidden), partition.num_ranks)}
    for index in range(spec.num_experts):
        expert = f"{mlp}.experts.{index}"
        parts[f"{expert}.gate_up.weight"] = _stacked(
            *(_cut(f"{expert}.{name}.weight", (ffn, hidden), columns) for name in ("gate", "up"))
        )
        parts[f"{expert}.down.weight"] = _cut(f"{expert}.down.weight", (hidden, ffn), columns, axis=1)
    return parts
