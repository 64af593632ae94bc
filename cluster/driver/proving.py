"""The shard proof as the driver asks for it: of all ranks at the start, and of each that takes a lost one's seat.

The files are read again once, shared over the ranks; what they add up to is kept, so that a rank which restarts
proves its own part and the others need not be asked. Knows ranks and their reports; what is proved, and how, is
in `model_shards.weights.proof`.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol

from cluster.driver.patience import Patience
from cluster.errors import StartupFailed
from model_shards.weights.proof import Checksum, Holding, add_up, refusal, unproved
from workers.reports import LoadReport

logger = logging.getLogger(__name__)


class AskedRanks(Protocol):
    """What of `cluster.driver.ranks.Ranks` is used here."""

    def call(
        self,
        what: str,
        method: Callable[[Any], Any],
        patience: Patience,
        which: Collection[int] | None = None,
    ) -> list[Any]: ...

    def name_of(self, rank: int) -> str: ...


class ShardProof:
    """What the files add up to, and what each rank has last said that it holds."""

    def __init__(self, file_sums: Mapping[str, Checksum]) -> None:
        self._file_sums = file_sums
        self._held: dict[int, tuple[Holding, ...]] = {}

    @classmethod
    def of_files(cls, ranks: AskedRanks, patience: Patience) -> "ShardProof":
        """Let the ranks read the files again. Raises `StartupFailed`."""
        shares = ranks.call("read the files again", lambda actor: actor.file_sums.remote(), patience)
        return cls(add_up(shares))

    def check(self, reports: Iterable[LoadReport], ranks: AskedRanks, patience: Patience) -> None:
        """Take in what ranks have loaded. Raises `StartupFailed`, naming tensor and rank, if it is not right."""
        self._held |= {report.rank: report.holdings for report in reports}
        wrong = unproved(self._held.values(), self._file_sums)
        if not wrong:
            return
        suspects = tuple(wrong)
        found = ranks.call(
            "compare its weights with the files", lambda actor: actor.differing.remote(suspects), patience
        )
        raise StartupFailed(refusal(wrong, {ranks.name_of(rank): each for rank, each in enumerate(found)}))
