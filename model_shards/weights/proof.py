"""The shard proof: whether what all ranks hold in memory adds up to the files, and who is to blame if not.

Every rank says which part of which file tensor it holds and the checksum of what is in its memory there
(`weights.holdings`); the files are read once more, without anything that cuts or slices (`weights.file_sums`). A
tensor is proved when its distinct parts add up to it and copies of a part are equal. Torch-free: the driver is
the judge.

Knows names, places and sums; knows nothing of how they were found, of processes or of Ray.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from model_shards.partition import Span

MODULUS = 2**32
_SHOWN = 5  # differences in a message; when ranks are swapped, all tensors differ

Checksum = tuple[int, int]  # see `weights.checksum`: two sums, each modulo 2**32


@dataclass(frozen=True, slots=True)
class Holding:
    """A part of a file tensor that a rank has in memory, placed as the file has it; a vector is one column."""

    tensor: str  # as the file calls it
    rows: Span
    columns: Span
    parameter: str  # of the model
    checksum: Checksum

    def __str__(self) -> str:
        return (
            f"{self.parameter} is not what {self.tensor!r} has in rows {self.rows.start}-{self.rows.stop} "
            f"and columns {self.columns.start}-{self.columns.stop}"
        )


def add_checksums(checksums: Iterable[Checksum]) -> Checksum:
    """Of a whole, from those of its parts."""
    first = second = 0
    for one, other in checksums:
        first, second = (first + one) % MODULUS, (second + other) % MODULUS
    return first, second


def add_up(shares: Iterable[Mapping[str, Checksum]]) -> dict[str, Checksum]:
    """Checksums of whole file tensors, from those of the shares in which the files were read."""
    parts: dict[str, list[Checksum]] = defaultdict(list)
    for share in shares:
        for tensor, checksum in share.items():
            parts[tensor].append(checksum)
    return {tensor: add_checksums(checksums) for tensor, checksums in parts.items()}


def unproved(ranks: Iterable[Collection[Holding]], file_sums: Mapping[str, Checksum]) -> dict[str, str]:
    """File tensor -> what is wrong with it, for every one that the ranks together do not hold as it is."""
    parts: dict[str, dict[tuple[Span, Span], set[Checksum]]] = defaultdict(lambda: defaultdict(set))
    for holdings in ranks:
        for holding in holdings:
            parts[holding.tensor][holding.rows, holding.columns].add(holding.checksum)
    wrong = dict.fromkeys(file_sums.keys() - parts.keys(), "no rank holds it")
    for tensor, checksums in parts.items():
        if tensor not in file_sums:
            wrong[tensor] = "it is not in the files"
        elif any(len(copies) > 1 for copies in checksums.values()):
            wrong[tensor] = "its copies differ"
        elif add_checksums(min(copies) for copies in checksums.values()) != file_sums[tensor]:
            wrong[tensor] = "the parts that the ranks hold do not add up to it"
    return dict(sorted(wrong.items()))


def refusal(wrong: Mapping[str, str], differing: Mapping[str, Collection[Holding]]) -> str:
    """In words: `differing` are the holdings, by the name of their rank, that the files contradict."""
    found = [f"{rank}: {holding}" for rank, holdings in differing.items() for holding in holdings]
    # Where each part is as the file has it, the parts leave a gap or overlap.
    lines = found or [f"{tensor!r}: {reason}" for tensor, reason in wrong.items()]
    more = f"; and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    return f"the weights in memory are not those of the files: {'; '.join(lines[:_SHOWN])}{more}"
