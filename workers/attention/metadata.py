"""Where the keys and values of one step's batch lie, as attention kernels need it; the same for every layer.

Knows slots, block tables and lengths; knows nothing of sequences' tokens or of a particular kernel.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor


@dataclass(frozen=True, slots=True)
class QueryRange:
    """Tokens [first, first + count) of the batch: the last `count` of the `context` tokens that a sequence has."""

    first: int
    count: int
    context: int


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One step. The first `num_decodes` sequences have one query token each and come with falling context lengths.

    Falling lengths let a kernel walk over the context of all decodes at once: those that reach as far are a
    prefix.
    """

    slots: Tensor  # [tokens] int64: where each token's key and value go
    queries: tuple[QueryRange, ...]  # one a sequence, in batch order
    num_decodes: int
    block_tables: npt.NDArray[np.int64]  # [sequences, blocks]; a short row goes on with its first block
