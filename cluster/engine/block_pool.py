"""Which KV blocks are free, which of these still hold a known text, and which are held by sequences.

A block is free, free but cached, or held, with a count of the tables that hold it; the three sum to the pool. A
text stays with its block, whoever holds it, until the block is given out for another one.

Knows block numbers and texts; knows nothing of sequences or plans.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence

from cluster.engine.block_hashing import BlockText


class BlockPool:
    """Invariant: a block with references is in no queue; one without is in `_cached` if it has a text, else in
    `_free`. No two blocks have texts of one hash.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = deque(range(num_blocks))  # oldest freed first
        self._cached: OrderedDict[int, None] = OrderedDict()  # free as well; longest unused first
        self._ref_counts = [0] * num_blocks
        self._texts: list[BlockText | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be given out: nobody holds them, though some are cached."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Of the free ones, those that still hold a text."""
        return len(self._cached)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def can_allocate(self, count: int) -> bool:
        return count <= self.num_free

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, which must be free: ask `can_allocate` first. Cached ones go last, oldest first."""
        assert count <= self.num_free, f"{count} blocks wanted, {self.num_free} free"
        blocks = [self._free.popleft() if self._free else self._evict() for _ in range(count)]
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Give up one reference to each block of a table. Tail first: the head of a text is worth most."""
        for block in reversed(blocks):
            assert self._ref_counts[block] > 0, f"block {block} is free already"
            self._ref_counts[block] -= 1
            if self._ref_counts[block] > 0:
                continue
            if self._texts[block] is None:
                self._free.append(block)
            else:
                self._cached[block] = None

    def find(self, text_hash: bytes) -> tuple[int, BlockText] | None:
        """The block whose text has this hash, and that text: compare it before you trust it."""
        block = self._by_hash.get(text_hash)
        if block is None:
            return None
        text = self._texts[block]
        assert text is not None
        return block, text

    def share(self, blocks: Sequence[int]) -> None:
        """Take one more reference to each of these, which `find` has just named."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                del self._cached[block]
            self._ref_counts[block] += 1

    def num_held(self, blocks: Sequence[int]) -> int:
        """How many of these somebody holds, so that sharing them takes nothing from what is free."""
        return sum(self._ref_counts[block] > 0 for block in blocks)

    def cache(self, block: int, text: BlockText) -> None:
        """This held block has `text` in full. Where another has that hash already, that one stays to be found."""
        assert self._ref_counts[block] > 0, f"block {block} is free"
        if text.hash not in self._by_hash:
            assert self._texts[block] is None, f"block {block} has a text already"
            self._by_hash[text.hash] = block
            self._texts[block] = text

    def reset(self) -> None:
        """The memory behind the blocks is gone: nothing that was ever written may be found again."""
        assert self.num_free == self.num_blocks, f"{self.num_blocks - self.num_free} blocks are still held"
        self._free = deque(range(self.num_blocks))
        self._cached.clear()
        self._by_hash.clear()
        self._texts = [None] * self.num_blocks

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Raises AssertionError unless `tables` are exactly the references the pool counts, and its queues and
        texts agree with them.
        """
        held = Counter(block for table in tables for block in table)
        free = set(self._free)
        assert len(free) == len(self._free), "a block is in the free queue twice"
        num_held = sum(count > 0 for count in self._ref_counts)
        assert len(free) + len(self._cached) + num_held == self.num_blocks, (
            f"{len(free)} free, {len(self._cached)} cached and {num_held} held of {self.num_blocks} blocks"
        )
        for block, count in enumerate(self._ref_counts):
            text = self._texts[block]
            assert held[block] == count, f"block {block}: {count} references counted, {held[block]} exist"
            assert (block in free) == (count == 0 and text is None), f"block {block}: {count} references, {text=}"
            assert (block in self._cached) == (count == 0 and text is not None), (
                f"block {block}: {count} references, {text=}"
            )
            assert text is None or self._by_hash.get(text.hash) == block, f"block {block} cannot be found"
        assert len(self._by_hash) == self.num_blocks - self._texts.count(None), (
            "a hash leads to a block without text"
        )

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        text = self._texts[block]
        assert text is not None
        del self._by_hash[text.hash]
        self._texts[block] = None
        return block
