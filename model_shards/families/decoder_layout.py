"""Every parameter of the decoder: which checkpoint tensors it is made of, and how each is cut.

The one declaration that construction, loading and planning share. Fused parameters (query, key and value; gate and
up) are several tensors stacked. Knows names and cuts; knows nothing of files or torch.
"""

from collections.abc import Mapping

from model_shards.partition import ModelPartition, ParameterLayout, Partition, Piece, Span
from model_shards.spec import ModelSpec

DecoderLayout = Mapping[str, ParameterLayout]


def decoder_layout(spec: ModelSpec, partition: ModelPartition) -> DecoderLayout:
    """Parameter name -> layout, in the order in which a model is filled."""
    layout = {
        "embedding.weight": _cut("embedding.weight", (spec.vocab_size, spec.hidden_size), partition.vocabulary)
    }
    for index in range(spec.num_layers):
        for name, parameter in _layer_layout(spec, partition, f"layers.{index}").items():
            layout[f"layers.{index}.{name}"] = parameter
    layout["norm.weight"] = _whole("norm.weight", (spec.hidden_size,), partition.num_ranks)
    if not spec.tied_embeddings:
        layout["head.weight"] = _cut("head.weight", (spec.vocab_size, spec.hidden_size), partition.vocabulary)
    return layout


def _layer_layout(spec: ModelSpec, partition: ModelPartition, layer: str) -> dict[str, ParameterLayout]:
    hidden = spec.hidden_size
    ranks = partition.num_ranks
    query_rows = tuple(span.scaled(spec.head_dim) for span in partition.query_heads)
    kv_rows = tuple(span.scaled(spec.head_dim) for span in partition.kv_heads)
    query_size = spec.num_query_heads * spec.head_dim
    kv_size = spec.num_kv_heads * spec.head_dim
    ffn = spec.intermediate_size

    def stacked(
        names: tuple[str, ...], sizes: tuple[int, ...], spans: tuple[tuple[Span, ...], ...], leaf: str
    ) -> ParameterLayout:
        tail = (hidden,) if leaf == "weight" else ()
        return ParameterLayout(
            tuple(
                Piece(f"{layer}.{name}.{leaf}", Partition((size, *tail), ranks, 0, cuts))
                for name, size, cuts in zip(names, sizes, spans, strict=True)
            )
        )

    qkv_names = ("attention.query", "attention.key", "attention.value")
    qkv = (qkv_names, (query_size, kv_size, kv_size), (query_rows, kv_rows, kv_rows))
    gate_up = (("mlp.gate", "mlp.up"), (ffn, ffn), (partition.ffn_columns,) * 2)
    parts = {
        "attention_norm.weight": _whole(f"{layer}.attention_norm.weight", (hidden,), ranks),
        "attention.qkv.weight": stacked(*qkv, "weight"),
        "attention.output.shard.weight": _cut(
            f"{layer}.attention.output.weight", (hidden, query_size), query_rows, axis=1
        ),
        "mlp_norm.weight": _whole(f"{layer}.mlp_norm.weight", (hidden,), ranks),
        "mlp.gate_up.weight": stacked(*gate_up, "weight"),
        "mlp.down.shard.weight": _cut(f"{layer}.mlp.down.weight", (hidden, ffn), partition.ffn_columns, axis=1),
    }
    if spec.qkv_bias:
        parts["attention.qkv.bias"] = stacked(*qkv, "bias")
    if spec.output_bias:  # added once, after the all-reduce, by every rank alike
        parts["attention.output.bias"] = _whole(f"{layer}.attention.output.bias", (hidden,), ranks)
    if spec.mlp_bias:
        parts["mlp.gate_up.bias"] = stacked(*gate_up, "bias")
        parts["mlp.down.bias"] = _whole(f"{layer}.mlp.down.bias", (hidden,), ranks)
    if spec.query_key_norm:
        for name in ("attention.query_norm.weight", "attention.key_norm.weight"):
            parts[name] = _whole(f"{layer}.{name}", (spec.head_dim,), ranks)
    return parts


def _whole(tensor: str, shape: tuple[int, ...], num_ranks: int) -> ParameterLayout:
    return ParameterLayout((Piece(tensor, Partition(shape, num_ranks)),))


def _cut(tensor: str, shape: tuple[int, ...], spans: tuple[Span, ...], axis: int = 0) -> ParameterLayout:
    return ParameterLayout((Piece(tensor, Partition(shape, len(spans), axis, spans)),))
