"""What a cut of a model means, from its numbers alone: the bytes of each rank, and which rule cut which tensor.

Reads the same declarations that construction and loading use, so that its bytes are those really allocated.
Torch-free; knows specs, partitions and layouts, nothing of files, devices or time.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, assert_never

from model_shards.families.decoder_layout import decoder_layout
from model_shards.families.gpt2_layout import gpt2_layout
from model_shards.partition import ModelLayout, ModelPartition, Partition, partition_model
from model_shards.spec import ModelSpec

Rule = Literal["whole", "rows", "columns"]

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """What one rank holds."""

    rank: int
    query_heads: int
    kv_heads: int
    ffn_columns: int
    vocabulary: int  # ids
    shard_bytes: int  # of weights, as they are read
    tied_copy_bytes: int  # of a tied head that is packed, beside the embedding
    table_bytes: int  # cosines and sines of all positions
    kv_bytes_per_token: int

    @property
    def weight_bytes(self) -> int:
        return self.shard_bytes + self.tied_copy_bytes + self.table_bytes


@dataclass(frozen=True, slots=True)
class TensorCut:
    """How one checkpoint tensor, or one in every layer and expert, is cut."""

    tensor: str  # canonical, with * for the number of a layer or expert
    count: int  # how many tensors have this name
    shape: tuple[int, ...]
    rule: Rule
    sizes: tuple[int, ...]  # rows or columns of each rank; empty where all hold it whole
    replicated: bool  # some rows are on several ranks


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """A model over ranks. `layout` is the one that a model of this cut is built with."""

    spec: ModelSpec
    partition: ModelPartition
    layout: ModelLayout
    ranks: tuple[RankPlan, ...]

    @property
    def cuts(self) -> tuple[TensorCut, ...]:
        """In the order of the model."""
        found: dict[str, TensorCut] = {}
        for parameter in self.layout.values():
            for piece in parameter.pieces:
                name = _NUMBER.sub("*", piece.tensor)
                count = found[name].count + 1 if name in found else 1
                found[name] = _cut(name, count, piece.partition)
        return tuple(found.values())


def plan_model(
    spec: ModelSpec,
    num_ranks: int,
    *,
    item_bytes: int,
    packed: bool,
    shard_weights: Sequence[int] = (),
) -> ModelPlan:
    """`item_bytes` are those of the dtype; `packed` says that weights are packed, as float32 on CPU is.

    Raises `PartitionError` for a cut that cannot be made.
    """
    partition = partition_model(spec, num_ranks, shard_weights)
    layout = _layout_of(spec, partition)
    ranks = tuple(_plan_rank(spec, partition, layout, rank, item_bytes, packed) for rank in range(num_ranks))
    return ModelPlan(spec, partition, layout, ranks)


def _layout_of(spec: ModelSpec, partition: ModelPartition) -> ModelLayout:
    match spec.architecture:
        case "llama" | "mistral" | "qwen2" | "qwen3" | "qwen3_moe" | "mixtral":
            return decoder_layout(spec, partition)
        case "gpt2":
            return gpt2_layout(spec, partition)
        case _:
            assert_never(spec.architecture)


def _plan_rank(
    spec: ModelSpec, partition: ModelPartition, layout: ModelLayout, rank: int, item_bytes: int, packed: bool
) -> RankPlan:
    kv_heads = partition.kv_heads[rank].size
    tied_copy = layout["embedding.weight"].local_size(rank) if spec.tied_embeddings and packed else 0
    table = 0 if spec.rope_theta is None else 2 * spec.max_positions * spec.head_dim
    return RankPlan(
        rank=rank,
        query_heads=partition.query_heads[rank].size,
        kv_heads=kv_heads,
        ffn_columns=partition.ffn_columns[rank].size,
        vocabulary=partition.vocabulary[rank].size,
        shard_bytes=sum(parameter.local_size(rank) for parameter in layout.values()) * item_bytes,
        tied_copy_bytes=tied_copy * item_bytes,
        table_bytes=table * item_bytes,
        kv_bytes_per_token=2 * spec.num_layers * kv_heads * spec.head_dim * item_bytes,
    )


def _cut(name: str, count: int, partition: Partition) -> TensorCut:
    if partition.axis is None:
        return TensorCut(name, count, partition.shape, "whole", (), replicated=partition.num_ranks > 1)
    sizes = tuple(span.size for span in partition.spans)
    rule: Rule = "rows" if partition.axis == 0 else "columns"
    return TensorCut(
        name, count, partition.shape, rule, sizes, replicated=sum(sizes) > partition.shape[partition.axis]
    )
