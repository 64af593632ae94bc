"""Sizes, refusals, and that what is written to slots comes back in gathered blocks."""

from dataclasses import dataclass

import pytest
import torch

from workers.errors import OutOfMemory
from workers.kv_cache import KvCache, bytes_per_block


@dataclass
class Shape:
    num_layers: int = 2
    num_local_kv_heads: int = 3
    head_dim: int = 8


def make_cache(num_blocks: int = 11, block_size: int = 4) -> KvCache:
    return KvCache(Shape(), num_blocks=num_blocks, block_size=block_size, dtype="float32", device="cpu")


def test_bytes_of_a_block_are_what_is_allocated() -> None:
    cache = make_cache()
    assert sum(layer.nbytes for layer in cache.layers) == 11 * bytes_per_block(Shape(), 4, "float32")
    assert bytes_per_block(Shape(), 4, "bfloat16") * 2 == bytes_per_block(Shape(), 4, "float32")


def test_written_tokens_come_back_by_block() -> None:
    cache = make_cache()
    blocks = torch.tensor([[7, 2], [10, 0]])
    slots = (blocks[:, :, None] * 4 + torch.arange(4)).view(-1)  # eight tokens of each of two sequences
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    key, value = torch.randn(16, 3, 8), torch.randn(16, 3, 8)
    cache.store(1, cache.token_rows(slots[order]), key[order], value[order], None)
    rows = cache.block_rows(blocks)
    gathered = cache.gather(1, rows, torch.empty(len(rows), 4 * 8)).view(2, 2, 3, 8, 8)
    for part, written in enumerate((key, value)):
        assert torch.equal(gathered[part].transpose(1, 2).reshape(16, 3, 8), written)
    assert not cache.layers[0].any()


def test_a_write_touches_its_slots_only() -> None:
    cache = make_cache()
    cache.store(0, cache.token_rows(torch.tensor([9])), torch.ones(1, 5, 8), torch.ones(1, 3, 8), None)
    touched = cache.layers[0].any(dim=-1).any(dim=1).any(dim=0)  # [blocks, block_size]
    assert touched.nonzero().tolist() == [[2, 1]]


@pytest.mark.parametrize("num_blocks", [0, 2**40])
def test_what_does_not_fit_is_refused_with_the_numbers(num_blocks: int) -> None:
    with pytest.raises(
        OutOfMemory, match=rf"{num_blocks} KV blocks of {bytes_per_block(Shape(), 4, 'float32')} b"
    ):
        make_cache(num_blocks)
