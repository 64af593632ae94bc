"""The rule by which a tensor is cut over ranks, declared once for construction, loading and plans.

A rank holds either whole KV groups or a part of exactly one group, so an attention kernel always sees one ratio of
query to KV heads; a KV head whose group is shared is replicated on the ranks that share it. FFN columns are cut
the other way, so that ranks balance. Knows shapes and ranks; knows nothing of files, modules or torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from math import floor, prod

from model_shards.errors import PartitionError
from model_shards.spec import ModelSpec

_LARGEST_ALIGNMENT = 64  # elements: whole cache lines, whole tensor-core tiles, two GGUF blocks
_UNITS_PER_RANK = 16  # an alignment that leaves fewer units a rank costs more balance than it brings speed


@dataclass(frozen=True, slots=True)
class Span:
    """A half-open range of indices."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def scaled(self, factor: int) -> "Span":
        """The same range counted in parts of a `factor`-th: heads to rows, say."""
        return Span(self.start * factor, self.stop * factor)


@dataclass(frozen=True, slots=True)
class Partition:
    """How one tensor is cut: along `axis`, one span a rank, or whole on every rank when `axis` is None."""

    shape: tuple[int, ...]
    num_ranks: int
    axis: int | None = None
    spans: tuple[Span, ...] = ()

    def local_spans(self, rank: int) -> tuple[Span, ...]:
        """The part of `rank`, as one span for each dimension."""
        whole = [Span(0, size) for size in self.shape]
        if self.axis is not None:
            whole[self.axis] = self.spans[rank]
        return tuple(whole)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        return tuple(span.size for span in self.local_spans(rank))


@dataclass(frozen=True, slots=True)
class Piece:
    """A checkpoint tensor, by its canonical name (see `weights.names`), and its cut."""

    tensor: str
    partition: Partition


@dataclass(frozen=True, slots=True)
class ParameterLayout:
    """A parameter of the model: the pieces, stacked along axis 0, that a rank's copy is made of."""

    pieces: tuple[Piece, ...]

    @classmethod
    def whole(cls, tensor: str, shape: tuple[int, ...], num_ranks: int) -> "ParameterLayout":
        """One tensor, the same on every rank."""
        return cls((Piece(tensor, Partition(shape, num_ranks)),))

    @classmethod
    def cut(cls, tensor: str, shape: tuple[int, ...], spans: tuple[Span, ...], axis: int = 0) -> "ParameterLayout":
        """One tensor, one of `spans` a rank."""
        return cls((Piece(tensor, Partition(shape, len(spans), axis, spans)),))

    @classmethod
    def stacked(cls, *parts: "ParameterLayout") -> "ParameterLayout":
        return cls(tuple(piece for part in parts for piece in part.pieces))

    def local_shape(self, rank: int) -> tuple[int, ...]:
        shapes = [piece.partition.local_shape(rank) for piece in self.pieces]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def local_size(self, rank: int) -> int:
        return prod(self.local_shape(rank))


ModelLayout = Mapping[str, ParameterLayout]  # parameter name -> layout, in the order of the model


@dataclass(frozen=True, slots=True)
class ModelPartition:
    """What each rank of a group holds of a model, counted in heads, FFN columns and vocabulary ids."""

    query_heads: tuple[Span, ...]
    kv_heads: tuple[Span, ...]
    ffn_columns: tuple[Span, ...]
    vocabulary: tuple[Span, ...]

    @property
    def num_ranks(self) -> int:
        return len(self.query_heads)


def partition_model(spec: ModelSpec, num_ranks: int, shard_weights: Sequence[int] = ()) -> ModelPartition:
    """Cut `spec` over `num_ranks`, with weight bytes as `shard_weights` stand to each other, equal by default.

    Raises `PartitionError` with the numbers.
    """
    if shard_weights and (len(shard_weights) != num_ranks or min(shard_weights) < 1):
        raise PartitionError(
            f"shard weights {list(shard_weights)} are not {num_ranks} positive numbers, one a rank"
        )
    shares = tuple(shard_weights) or (1,) * num_ranks
    query_heads, kv_heads = cut_heads(spec.num_query_heads, spec.num_kv_heads, num_ranks, shares)
    # A head costs head_dim rows of the query and columns of the output projection (a KV head: key and value);
    # a gated FFN column costs a row of gate and up and a column of down: 2 against 3, each times hidden_size.
    burdens = [
        Fraction(2 * spec.head_dim * (query.size + kv.size), spec.matrices_per_ffn_column)
        for query, kv in zip(query_heads, kv_heads, strict=True)
    ]
    return ModelPartition(
        query_heads=query_heads,
        kv_heads=kv_heads,
        ffn_columns=cut_balanced(spec.intermediate_size, burdens, "FFN columns", shares),
        vocabulary=cut_balanced(spec.vocab_size, [Fraction(0)] * num_ranks, "vocabulary ids", shares),
    )


def cut_heads(
    num_query_heads: int, num_kv_heads: int, num_ranks: int, shares: Sequence[int] = ()
) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
    """Each rank's query heads and KV heads. Query heads are cut exactly; a KV head may be on several ranks.

    Heads go as the ranks' `shares` stand to each other, as nearly as whole heads can.
    """
    if num_ranks < 1 or num_ranks > num_query_heads:
        raise PartitionError(
            f"{num_query_heads} query heads cannot be split over {num_ranks} ranks: "
            f"the number of ranks must be between 1 and {num_query_heads}"
        )
    shares = shares or (1,) * num_ranks
    ratio = num_query_heads // num_kv_heads
    if num_ranks <= num_kv_heads:
        kv_heads = _in_proportion(num_kv_heads, shares)
        return tuple(span.scaled(ratio) for span in kv_heads), tuple(kv_heads)
    query, kv = [], []
    for group, sharers in enumerate(_in_proportion(num_ranks, (1,) * num_kv_heads)):
        for part in _in_proportion(ratio, shares[sharers.start : sharers.stop]):
            query.append(Span(group * ratio + part.start, group * ratio + part.stop))
            kv.append(Span(group, group + 1))
    return tuple(query), tuple(kv)


def cut_balanced(
    total: int, burdens: Sequence[Fraction], what: str, shares: Sequence[int] = ()
) -> tuple[Span, ...]:
    """Cut `total` items into one contiguous span a rank so that each rank's items plus its burden come out level,
    or as `shares` stand to each other.

    Every rank gets at least one item. Cuts fall on multiples of `alignment_for(...)`, except the end.
    """
    num_ranks = len(burdens)
    if num_ranks < 1 or total < num_ranks:
        raise PartitionError(
            f"{total} {what} cannot be split over {num_ranks} ranks: every rank needs at least one"
        )
    alignment = alignment_for(total, num_ranks)
    amounts = _fill_level(
        Fraction(total, alignment), [burden / alignment for burden in burdens], shares or (1,) * num_ranks
    )
    spans, edge, start = [], Fraction(0), 0
    for rank, amount in enumerate(amounts):
        edge += amount
        # Amounts are at least one unit, so rounding half up keeps the edges apart and below the last one.
        stop = total if rank == num_ranks - 1 else floor(edge + Fraction(1, 2)) * alignment
        spans.append(Span(start, stop))
        start = stop
    return tuple(spans)


def alignment_for(total: int, num_ranks: int) -> int:
    """The largest power of two, up to 64, that still leaves every rank enough units to balance with."""
    alignment = _LARGEST_ALIGNMENT
    while alignment > 1 and total // alignment < num_ranks * _UNITS_PER_RANK:
        alignment //= 2
    return alignment


def _in_proportion(total: int, shares: Sequence[int]) -> list[Span]:
    """Contiguous spans of at least one each, whose sizes stand to each other as `shares`, as nearly as can be.

    One after the other goes to whoever has least for its share (D'Hondt's rule), to the earlier one among equals:
    with equal shares sizes differ by at most one, the larger ones first.
    """
    sizes = [1] * len(shares)
    for _ in range(total - len(shares)):
        sizes[min(range(len(shares)), key=lambda part: Fraction(sizes[part] + 1, shares[part]))] += 1
    edges = [0, *accumulate(sizes)]
    return [Span(start, stop) for start, stop in pairwise(edges)]


def _fill_level(total: Fraction, burdens: Sequence[Fraction], shares: Sequence[int]) -> list[Fraction]:
    """Pour `total` over ranks that already carry `burdens`, as water finds its level in vessels as wide as their
    `shares`; at least 1 for each."""
    spare = total - len(burdens)
    by_height = sorted(range(len(burdens)), key=lambda rank: burdens[rank] / shares[rank])
    level = Fraction(0)
    for count in range(1, len(burdens) + 1):
        reached = by_height[:count]
        level = (spare + sum(burdens[rank] for rank in reached)) / sum(shares[rank] for rank in reached)
        if count == len(burdens) or level <= burdens[by_height[count]] / shares[by_height[count]]:
            break
    return [1 + max(Fraction(0), level * share - burden) for burden, share in zip(burdens, shares, strict=True)]
