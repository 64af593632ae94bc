"""The block pool: free and held sum to the pool, whatever is done to it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.engine.block_pool import BlockPool


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


@settings(derandomize=True, max_examples=200)
@given(st.lists(st.integers(0, 5), max_size=60), st.randoms(use_true_random=False))
def test_any_order_of_allocating_and_freeing(counts: list[int], random: object) -> None:
    pool = BlockPool(12, 4)
    tables: list[list[int]] = []
    for count in counts:
        if pool.can_allocate(count) and count:
            tables.append(pool.allocate(count))
        elif tables:
            pool.free(tables.pop(random.randrange(len(tables))))  # type: ignore[attr-defined]
        pool.check_integrity(tables)
        assert pool.num_free + sum(map(len, tables)) == 12
    for table in tables:
        pool.free(table)
    pool.check_integrity([])
    assert pool.num_free == 12
