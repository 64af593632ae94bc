"""Which blocks a sequence need not compute, because the ranks hold them, and which of its own others may read.

- A block may be read by plans made after the one that computes it: ranks execute in order, so an earlier plan that
  is still in flight is as good as done. A plan never reads what it computes itself.
- A block is cached only when each of its tokens is confirmed in the sequence's own log. A token that is sampled
  but not yet reported is in no text.
- The block of a sequence's last known token is never taken from the cache: the last token is computed in any case,
  and blocks that several sequences hold are never written.

Generated tokens are cached like those of a prompt: the next turn of a conversation finds them, and so does a
preempted sequence that comes back. Knows sequences, texts and the pool; knows nothing of budgets, rows or results.
"""

from cluster.engine.block_hashing import BlockHash, BlockText, digest, next_text, root_text, same_text
from cluster.engine.block_pool import BlockPool
from cluster.engine.sequence import Sequence


class PrefixCache:
    """Disabled, it finds nothing and keeps nothing. Each block of a sequence is hashed once."""

    def __init__(self, pool: BlockPool, enabled: bool, block_hash: BlockHash = digest) -> None:
        self._pool = pool
        self._enabled = enabled
        self._block_hash = block_hash
        self._coming: list[tuple[int, BlockText]] = []  # full blocks that the plan in the making computes
        self._coming_texts: dict[bytes, BlockText] = {}  # the same, by hash
        self.num_queried_tokens = 0  # of prompts, when their sequences first started
        self.num_hit_tokens = 0  # of these, found

    def find(self, sequence: Sequence) -> list[int]:
        """The blocks that hold the head of its tokens, to be shared at once or asked for again."""
        blocks: list[int] = []
        for number in range(self._most_to_find(sequence)):
            text = self._text_of(sequence, number)
            found = self._pool.find(text.hash)
            if found is None:
                break
            block, cached = found
            before = sequence.texts[number]
            if cached.content != text.content or not same_text(cached.before, before):
                break
            sequence.texts[number + 1] = cached
            blocks.append(block)
        return blocks

    def is_coming(self, sequence: Sequence, num_found: int) -> bool:
        """Whether the plan in the making computes what `find` missed first: the next plan can read it."""
        if not self._coming_texts or num_found >= self._most_to_find(sequence):
            return False
        text = self._text_of(sequence, num_found)
        coming = self._coming_texts.get(text.hash)
        return coming is not None and same_text(coming, text)

    def begin(self, sequence: Sequence, num_found: int) -> None:
        """It starts, or comes back, with this many blocks found."""
        num_tokens = num_found * self._pool.block_size
        sequence.num_computed_tokens = num_tokens
        sequence.num_kept_blocks = num_found
        if not sequence.has_started:
            sequence.has_started = True
            sequence.num_cached_tokens = num_tokens
            if self._enabled and sequence.reads_cache:
                self.num_queried_tokens += len(sequence.token_ids)
                self.num_hit_tokens += num_tokens

    def keep(self, sequence: Sequence) -> None:
        """Cache what earlier plans have computed of it."""
        for number in self._new_blocks(sequence):
            self._pool.cache(sequence.blocks[number], self._text_of(sequence, number))

    def keep_after_plan(self, sequence: Sequence) -> None:
        """The same, when the last of it is computed by the plan in the making."""
        for number in self._new_blocks(sequence):
            text = self._text_of(sequence, number)
            self._coming.append((sequence.blocks[number], text))
            self._coming_texts[text.hash] = text

    def end_plan(self) -> None:
        """The plan is made. What it computes may be read by the next."""
        if self._coming:
            for block, text in self._coming:
                self._pool.cache(block, text)
            self._coming.clear()
            self._coming_texts.clear()

    def _new_blocks(self, sequence: Sequence) -> range:
        """The numbers of full blocks with confirmed tokens that were not offered yet; they are from now on."""
        num_tokens = min(len(sequence.token_ids), sequence.num_computed_tokens) if self._enabled else 0
        numbers = range(sequence.num_kept_blocks, num_tokens // self._pool.block_size)
        if numbers:
            sequence.num_kept_blocks = numbers.stop
        return numbers

    def _most_to_find(self, sequence: Sequence) -> int:
        """Full blocks before the last token."""
        if not (self._enabled and sequence.reads_cache):
            return 0
        return (len(sequence.token_ids) - 1) // self._pool.block_size

    def _text_of(self, sequence: Sequence, number: int) -> BlockText:
        """The text up to the end of its block `number`."""
        texts, size = sequence.texts, self._pool.block_size
        if not texts:
            texts.append(root_text(sequence.cache_fields, self._block_hash))
        while len(texts) <= number + 1:
            start = (len(texts) - 1) * size
            token_ids = tuple(sequence.token_ids[start : start + size])
            texts.append(next_text(texts[-1], token_ids, self._block_hash))
        return texts[number + 1]
