"""The block pool: free, cached and held sum to the pool, whatever is done to it."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.engine.block_hashing import BlockText, next_text, root_text
from cluster.engine.block_pool import BlockPool


def texts(count: int, first: int = 0) -> list[BlockText]:
    """A chain of blocks of one token each."""
    chain = [root_text({})]
    for number in range(count):
        chain.append(next_text(chain[-1], (first + number,)))
    return chain[1:]


def test_blocks_for_rounds_up() -> None:
    pool = BlockPool(8, 4)
    assert [pool.blocks_for(count) for count in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]


def test_what_was_freed_first_is_used_first_tail_before_head() -> None:
    pool = BlockPool(4, 4)
    first, second = pool.allocate(2), pool.allocate(2)
    pool.free(second)
    pool.free(first)
    assert pool.allocate(4) == [*reversed(second), *reversed(first)]


def test_too_much_and_twice_are_bugs() -> None:
    pool = BlockPool(2, 4)
    assert not pool.can_allocate(3)
    with pytest.raises(AssertionError, match="3 blocks wanted, 2 free"):
        pool.allocate(3)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(AssertionError, match="free already"):
        pool.free(blocks)


def test_integrity_finds_a_leak_and_a_share() -> None:
    pool = BlockPool(4, 4)
    table = pool.allocate(2)
    pool.check_integrity([table])
    with pytest.raises(AssertionError, match="1 references counted, 0 exist"):
        pool.check_integrity([table[:1]])
    with pytest.raises(AssertionError, match="1 references counted, 2 exist"):
        pool.check_integrity([table, table[:1]])


def test_a_cached_block_is_found_held_and_free_until_it_is_given_out() -> None:
    pool = BlockPool(4, 1)
    head, tail = texts(2)
    table = pool.allocate(2)
    for block, text in zip(table, (head, tail), strict=True):
        pool.cache(block, text)
    assert pool.find(head.hash) == (table[0], head)
    pool.share(table)
    assert (pool.num_free, pool.num_cached, pool.num_held(table)) == (2, 0, 2)
    pool.free(table)
    pool.free(table)
    assert (pool.num_free, pool.num_cached, pool.num_held(table)) == (4, 2, 0)
    pool.check_integrity([])
    assert table[1] in pool.allocate(3)  # free ones first, then the tail
    assert pool.find(tail.hash) is None
    assert pool.find(head.hash) == (table[0], head)


def test_of_equal_texts_the_first_stays() -> None:
    pool = BlockPool(4, 1)
    first, second = pool.allocate(1), pool.allocate(1)
    (text,) = texts(1)
    pool.cache(first[0], text)
    pool.cache(second[0], text)
    assert pool.find(text.hash) == (first[0], text)
    pool.free(second)
    assert pool.num_cached == 0
    pool.check_integrity([first])


def test_a_reset_forgets_every_text_and_needs_every_block() -> None:
    pool = BlockPool(4, 1)
    table = pool.allocate(2)
    (text,) = texts(1)
    pool.cache(table[0], text)
    with pytest.raises(AssertionError, match="2 blocks are still held"):
        pool.reset()
    pool.free(table)
    pool.reset()
    assert pool.find(text.hash) is None
    assert (pool.num_free, pool.num_cached) == (4, 0)
    pool.check_integrity([])


def test_integrity_finds_a_text_that_cannot_be_found_and_a_lost_block() -> None:
    pool = BlockPool(4, 1)
    table = pool.allocate(2)
    (text,) = texts(1)
    pool.cache(table[0], text)
    pool._by_hash.clear()
    with pytest.raises(AssertionError, match="cannot be found"):
        pool.check_integrity([table])
    pool = BlockPool(4, 1)
    pool._free.pop()
    with pytest.raises(AssertionError, match="3 free, 0 cached and 0 held of 4 blocks"):
        pool.check_integrity([])


@settings(derandomize=True, max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2)), max_size=60), st.randoms(use_true_random=False))
def test_any_order_of_allocating_sharing_and_freeing(wanted: list[tuple[int, int]], random: Random) -> None:
    pool = BlockPool(12, 1)
    chains = [texts(5, first) for first in (0, 100, 200)]
    tables: list[list[int]] = []
    for count, which in wanted:
        chain = chains[which][:count]
        found = [hit[0] for text in chain if (hit := pool.find(text.hash)) is not None]
        if count and pool.can_allocate(count - pool.num_held(found)):
            pool.share(found)
            tables.append(found + pool.allocate(count - len(found)))
            missing = [text for text in chain if pool.find(text.hash) is None]
            for block, text in zip(tables[-1][len(found) :], missing, strict=False):
                pool.cache(block, text)
        elif tables:
            pool.free(tables.pop(random.randrange(len(tables))))
        pool.check_integrity(tables)
        assert pool.num_free + len({block for table in tables for block in table}) == 12
    for table in tables:
        pool.free(table)
    pool.check_integrity([])
    assert pool.num_free == 12
