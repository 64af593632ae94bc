"""The shard proof: whether what all ranks hold in memory adds up to the files, and who is to blame if not.

Every rank says which part of which file tensor it holds and the checksum of what is in its memory there
(`weights.holdings`); the files are read once more, without anything that cuts or slices (`weights.file_sums`). A
tensor is proved when its distinct parts add up to it and copies of a part are equal. Torch-free: the driver is
the judge.

Knows names, places and sums; knows nothing of how they were found, of processes or of Ray.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from model_shards.partition import Span

_MODULUS = 2**32
_SHOWN = 5  # differences in a message; when ranks are swapped, all tensors differ


@dataclass(frozen=True, slots=True)
class Holding:
    """A part of a file tensor that a rank has in memory, placed as the file has it; a vector is one row."""

    tensor: str  # as the file calls it
    rows: Span
    columns: Span
    parameter: str  # of the model
    checksum: int  # see `weights.checksum`, modulo 2**32

    def __str__(self) -> str:
        return (
            f"{self.parameter} is not what {self.tensor!r} has in rows {self.rows.start}-{self.rows.stop} "
            f"and columns {self.columns.start}-{self.columns.stop}"
        )


def add_up(shares: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Checksums of whole file tensors, from those of the shares in which the files were read."""
    total: dict[str, int] = defaultdict(int)
    for share in shares:
        for tensor, checksum in share.items():
            total[tensor] = (total[tensor] + checksum) % _MODULUS
    return dict(total)


def unproved(ranks: Sequence[Collection[Holding]], file_sums: Mapping[str, int]) -> dict[str, str]:
    """File tensor -> what is wrong with it, for every one that the ranks together do not hold as it is."""
    parts: dict[str, dict[tuple[Span, Span], set[int]]] = defaultdict(lambda: defaultdict(set))
    for holdings in ranks:
        for holding in holdings:
            parts[holding.tensor][holding.rows, holding.columns].add(holding.checksum)
    wrong = dict.fromkeys(file_sums.keys() - parts.keys(), "no rank holds it")
    for tensor, checksums in parts.items():
        if tensor not in file_sums:
            wrong[tensor] = "it is not in the files"
        elif any(len(copies) > 1 for copies in checksums.values()):
            wrong[tensor] = "its copies differ"
        elif sum(min(copies) for copies in checksums.values()) % _MODULUS != file_sums[tensor]:
            wrong[tensor] = "the parts that the ranks hold do not add up to it"
    return dict(sorted(wrong.items()))


def refusal(wrong: Mapping[str, str], differing: Mapping[str, Collection[Holding]]) -> str:
    """In words: `differing` are the holdings, by the name of their rank, that the files contradict."""
    found = [f"{rank}: {holding}" for rank, holdings in differing.items() for holding in holdings]
    # Where each part is as the file has it, the parts leave a gap or overlap.
    lines = found or [f"{tensor!r}: {reason}" for tensor, reason in wrong.items()]
    more = f"; and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    return f"the weights in memory are not those of the files: {'; '.join(lines[:_SHOWN])}{more}"
