"""One rank's paged KV memory: what a block costs, and the tensors that hold all blocks.

Each layer is one tensor [2, KV heads, blocks, block_size, head_dim], keys first. Heads come before blocks so
that gathering a sequence's blocks, one `index_select` over contiguous rows of block_size * head_dim, gives
matrices [keys, head_dim] of each head that a kernel multiplies as they are; a token-major cache would need a
transposing copy of everything it reads. Seen as `permute(1, 2, 0, 3)` of its halves it is also the strided
[blocks, block_size, KV heads, head_dim] that paged GPU kernels take.

Knows blocks and slots; knows nothing of which sequence holds them.
"""

import math
import mmap
from typing import Protocol

import torch
from torch import Tensor

from model_shards.layers import ops
from model_shards.layers.rotary import Rotation
from workers.config import Device, Dtype
from workers.device import free_memory, torch_dtype
from workers.errors import OutOfMemory


class CachedModel(Protocol):
    """What the size of a block depends on: a part of `ShardedModel`."""

    num_layers: int
    num_local_kv_heads: int
    head_dim: int


def bytes_per_block(model: CachedModel, block_size: int, dtype: Dtype) -> int:
    """Bytes of this rank's share of one block, over all layers, keys and values."""
    values = 2 * model.num_layers * model.num_local_kv_heads * block_size * model.head_dim
    return values * torch_dtype(dtype).itemsize


class KvCache:
    """Keys and values of `num_blocks` blocks for every layer of one rank.

    Slot `block * block_size + offset` is one token's place. Memory starts as zeros and always holds finite
    numbers, so that a kernel may read past a sequence's end and mask what it read.
    """

    def __init__(
        self, model: CachedModel, *, num_blocks: int, block_size: int, dtype: Dtype, device: Device
    ) -> None:
        """Raises `OutOfMemory`, with the arithmetic, when the blocks do not fit into what is free."""
        block_bytes = bytes_per_block(model, block_size, dtype)
        free = free_memory(device)
        if num_blocks < 1 or num_blocks * block_bytes > free:
            raise OutOfMemory(
                f"{num_blocks} KV blocks of {block_bytes} bytes ({block_size} tokens, {model.num_layers} layers, "
                f"{model.num_local_kv_heads} KV heads of {model.head_dim}, {dtype}) are "
                f"{num_blocks * block_bytes} bytes; {free} bytes are free on {device}, "
                f"which is {free // block_bytes} blocks"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_heads = model.num_local_kv_heads
        self.head_dim = model.head_dim
        self.layers = [
            _zeros((2, self.num_heads, num_blocks, block_size, self.head_dim), torch_dtype(dtype), device)
            for _ in range(model.num_layers)
        ]
        self._block_rows = [layer.view(-1, block_size * self.head_dim) for layer in self.layers]
        self._token_rows = [layer.view(-1, self.head_dim) for layer in self.layers]

    @property
    def dtype(self) -> torch.dtype:
        return self.layers[0].dtype

    @property
    def device(self) -> torch.device:
        return self.layers[0].device

    def token_rows(
        self,
        slots: Tensor,  # [tokens] int64
    ) -> tuple[Tensor, Tensor]:
        """Where keys and values of each token and head go, for `store`: two indices, good for all layers."""
        num_slots = self.num_blocks * self.block_size
        heads = torch.arange(self.num_heads, device=slots.device) * num_slots
        keys = (slots[:, None] + heads).view(-1)
        return keys, keys + self.num_heads * num_slots

    def store(
        self,
        layer: int,
        rows: tuple[Tensor, Tensor],  # from `token_rows`
        heads: Tensor,  # [tokens, query heads + KV heads, head_dim], those of the queries first
        value: Tensor,  # [tokens, KV heads, head_dim]
        rotation: Rotation | None,
    ) -> tuple[Tensor, Tensor]:  # queries and keys, rotated
        """Keep what one layer computed for the tokens of a step."""
        return ops.rotate_and_store(heads, value, rotation, self._token_rows[layer], rows)

    def block_rows(
        self,
        blocks: Tensor,  # [sequences, blocks] int64
    ) -> Tensor:
        """The flat index with which `gather` reads these blocks; the same for all layers."""
        parts = torch.arange(2 * self.num_heads, device=blocks.device) * self.num_blocks
        index = parts.view(2, 1, self.num_heads, 1) + blocks[None, :, None, :]
        return index.view(-1)

    def gather(
        self,
        layer: int,
        rows: Tensor,  # from `block_rows`
        out: Tensor,  # [len(rows), block_size * head_dim]
    ) -> Tensor:
        """Copy blocks into `out`, whose order is [keys and values, sequences, KV heads, blocks]."""
        return torch.index_select(self._block_rows[layer], 0, rows, out=out)

    def tokens(
        self,
        layer: int,
        slots: Tensor,  # [tokens] int64
    ) -> tuple[Tensor, Tensor]:  # both [tokens, KV heads, head_dim], strided
        """A copy of the keys and the values in these slots."""
        by_head = self.layers[layer].view(2 * self.num_heads, -1, self.head_dim)
        both = by_head.index_select(1, slots).view(2, self.num_heads, -1, self.head_dim)
        return both[0].transpose(0, 1), both[1].transpose(0, 1)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: Device) -> Tensor:
    """On a CPU, pages that the kernel zeroes when they are first written: `torch.zeros` would write every byte of
    a cache that may never fill, seconds for each GiB, while the cluster starts.
    """
    if device != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
