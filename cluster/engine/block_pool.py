"""Which KV blocks are free and which are held. Knows block numbers; knows nothing of tokens or sequences.

A block is free or held, with a count of the tables that hold it; the two sum to the pool.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence


class BlockPool:
    """Invariant: a block is in the free queue exactly when its reference count is 0."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = deque(range(num_blocks))  # oldest freed first
        self._ref_counts = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def can_allocate(self, count: int) -> bool:
        return count <= len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, which must be free: ask `can_allocate` first."""
        assert count <= len(self._free), f"{count} blocks wanted, {len(self._free)} free"
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Give up one reference to each block of a table. Tail first: the head of a text is worth most."""
        for block in reversed(blocks):
            assert self._ref_counts[block] > 0, f"block {block} is free already"
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free.append(block)

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Raises AssertionError unless `tables` are exactly the references the pool counts."""
        held = Counter(block for table in tables for block in table)
        free = set(self._free)
        assert len(free) == len(self._free), "a block is in the free queue twice"
        for block, count in enumerate(self._ref_counts):
            assert held[block] == count, f"block {block}: {count} references counted, {held[block]} exist"
            assert (block in free) == (count == 0), f"block {block}: {count} references, free: {block in free}"
