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


@dataclass(frozen=True, slots=True)
class DeviceMetadata:
    """One step as kernels on an accelerator read it: tensors on the device, and on the host what a launch needs.

    Sequences stand in the order of `AttentionMetadata`. Nothing in here has to be read back.
    """

    slots: Tensor  # [tokens] int64: where each token's key and value go
    starts: Tensor  # [sequences + 1] int32: the first token of each sequence, then the number of tokens
    contexts: Tensor  # [sequences] int32: tokens of each, those of this step included
    block_tables: Tensor  # [sequences, blocks] int32; beyond a context any block that exists
    num_decodes: int
    longest_query: int  # bounds; they may be higher than what is there
    longest_context: int
    num_prompt_keys: int = 0  # the contexts of the sequences after the decodes, added up
    fresh_prompts: bool = False  # whether these compute all of their context in this step
