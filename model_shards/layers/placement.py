"""What every layer of one rank's shard has in common: its group, device and arithmetic. Plain values."""

from dataclasses import dataclass

import torch

from model_shards.group import TensorParallelGroup


@dataclass(frozen=True, slots=True)
class Placement:
    group: TensorParallelGroup
    device: torch.device
    dtype: torch.dtype
    batch_invariant: bool = True  # equal bits for a row in any batch
    shard_weights: tuple[int, ...] = ()  # how the ranks' shards stand to each other; empty: equal
