"""The arithmetic of the KV pool."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.driver.sizing import CPU_LIMIT, RankMemory, check_room_on_cpu, pool_size, sequence_limit
from cluster.errors import StartupFailed

GIB = 2**30
PLENTY = 10**9


def test_a_set_budget_is_shared_by_all_ranks() -> None:
    ranks = [RankMemory("a", 8 * GIB, 2_000), RankMemory("a", 8 * GIB, 1_000)]

    assert pool_size(ranks, device="cpu", gpu_memory_share=0.9, kv_cache_memory=30_000, most_useful=PLENTY) == 10


def test_cpu_default_is_two_gib_over_all_ranks_where_there_is_room() -> None:
    ranks = [RankMemory("a", 100 * GIB, 2**20), RankMemory("a", 100 * GIB, 2**20)]

    assert (
        pool_size(ranks, device="cpu", gpu_memory_share=0.9, kv_cache_memory=None, most_useful=PLENTY)
        == CPU_LIMIT // 2**21
    )


def test_cpu_default_is_a_quarter_of_what_is_free_where_there_is_little() -> None:
    ranks = [RankMemory("a", 4 * GIB, 2**20), RankMemory("a", 4 * GIB, 2**20)]

    assert (
        pool_size(ranks, device="cpu", gpu_memory_share=0.9, kv_cache_memory=None, most_useful=PLENTY)
        == GIB // 2**21
    )


def test_the_smallest_node_decides() -> None:
    ranks = [RankMemory("a", 64 * GIB, 2**20), RankMemory("b", 2 * GIB, 2**20)]

    assert (
        pool_size(ranks, device="cpu", gpu_memory_share=0.9, kv_cache_memory=None, most_useful=PLENTY)
        == GIB // 2 // 2**20
    )


def test_the_smallest_gpu_decides() -> None:
    ranks = [RankMemory("a", 10 * GIB, 2**20, 20 * GIB, GIB), RankMemory("a", 20 * GIB, 2**20, 20 * GIB, GIB)]

    # Of 20 GiB a tenth is kept back, and the largest step takes one.
    assert (
        pool_size(ranks, device="cuda", gpu_memory_share=0.9, kv_cache_memory=None, most_useful=PLENTY) == 7 * 1024
    )


def test_a_gpu_that_others_fill_holds_nothing() -> None:
    ranks = [RankMemory("a", GIB, 2**20, 20 * GIB, GIB)]

    assert pool_size(ranks, device="cuda", gpu_memory_share=0.9, kv_cache_memory=None, most_useful=PLENTY) == 0


def test_a_set_budget_is_not_cut_by_a_share_of_the_gpu() -> None:
    ranks = [RankMemory("a", GIB, 2**20, 20 * GIB, GIB)]

    assert pool_size(ranks, device="cuda", gpu_memory_share=0.1, kv_cache_memory=GIB, most_useful=PLENTY) == 1024


def test_ranks_of_one_node_have_its_memory_together() -> None:
    ranks = [RankMemory("a" * 40, GIB, 2**20), RankMemory("a" * 40, GIB, 2**20), RankMemory("b", GIB, 2**20)]

    check_room_on_cpu(512, ranks)
    needed = f"513 KV blocks are {513 * 2**21} bytes for the 2 ranks on node aaaaaaaa"
    with pytest.raises(StartupFailed, match=f"^{needed}, where {GIB} bytes are free: set kv_cache_memory lower$"):
        check_room_on_cpu(513, ranks)


def test_no_more_than_can_be_used() -> None:
    assert (
        pool_size(
            [RankMemory("a", GIB, 1)], device="cpu", gpu_memory_share=0.9, kv_cache_memory=None, most_useful=77
        )
        == 77
    )


def test_the_wanted_length_is_kept_when_it_fits() -> None:
    assert sequence_limit(64, 16, 1024, explicit=True, block_bytes=1) == 1024


def test_the_models_own_length_is_cut_to_the_pool() -> None:
    assert sequence_limit(10, 16, 8192, explicit=False, block_bytes=1) == 160


def test_an_asked_for_length_that_does_not_fit_fails_with_the_arithmetic() -> None:
    with pytest.raises(
        StartupFailed, match=r"needs 7 KV blocks of 16 tokens, 7 x 100 = 700 bytes .* 5 blocks"
    ) as no:
        sequence_limit(5, 16, 100, explicit=True, block_bytes=100)
    assert str(no.value).endswith("set kv_cache_memory higher or max_model_len to 80 or lower")
    assert sequence_limit(5, 16, 80, explicit=True, block_bytes=100) == 80


def test_a_pool_without_a_block_fails_even_by_default() -> None:
    with pytest.raises(StartupFailed, match="0 blocks") as no:
        sequence_limit(0, 16, 100, explicit=False, block_bytes=100)
    assert str(no.value).endswith("set kv_cache_memory higher"), "no length would help"


@given(
    ranks=st.lists(
        st.builds(
            RankMemory,
            st.sampled_from(["a", "b"]),
            st.integers(0, 2**40),
            st.integers(1, 2**24),
        ),
        min_size=1,
        max_size=8,
    ),
    budget=st.none() | st.integers(1, 2**40),
)
def test_a_pool_never_costs_more_than_its_budget(ranks: list[RankMemory], budget: int | None) -> None:
    blocks = pool_size(ranks, device="cpu", gpu_memory_share=0.9, kv_cache_memory=budget, most_useful=PLENTY)

    assert 0 <= blocks * sum(rank.bytes_per_block for rank in ranks) <= (budget or CPU_LIMIT)
