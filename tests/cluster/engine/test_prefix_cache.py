"""What is computed once and read by others, and what is never shared. Blocks hold four tokens.

The scripted executor compares every slot that is read with the text that is claimed.
"""

import pytest

from cluster.engine.block_pool import BlockPool
from cluster.engine.prefix_cache import PrefixCache
from cluster.engine.sequence import make_sequence
from cluster.generation import FinishReason, GenerationRequest, SamplingParams
from tests.cluster.engine.rig import Rig, counted, make_request
from workers.protocol import NewSequence, SequenceId


def started(rig: Rig) -> list[NewSequence]:
    return [new for plan in (*rig.executor.executed, *rig.executor.queued) for new in plan.new]


def num_computed(rig: Rig) -> int:
    plans = rig.executor.executed
    return sum(row.num_new_tokens for plan in plans for rows in (plan.new, plan.known) for row in rows)


def run(rig: Rig, *requests: GenerationRequest) -> None:
    rig.add(*requests)
    rig.run_until_idle()
    for request in requests:
        for choice in range(request.sampling.n):
            assert rig.tokens[request.request_id, choice] == counted(request)
    rig.assert_nothing_left()


def test_a_prompt_that_is_cached_whole_computes_its_last_block_again(depth: int) -> None:
    rig = Rig(depth=depth)
    run(rig, make_request("first", 16, 3))
    run(rig, make_request("again", 16, 3))
    assert [(new.num_computed_tokens, new.num_new_tokens) for new in started(rig)] == [(0, 16), (12, 4)]
    assert rig.cached == {("first", 0): 0, ("again", 0): 12}
    assert (rig.core.stats().prefix_cache_queries, rig.core.stats().prefix_cache_hits) == (32, 12)


def test_only_full_blocks_of_the_common_beginning_are_shared(depth: int) -> None:
    rig = Rig(depth=depth)
    run(rig, make_request("first", 11, 3))
    same_head = (*range(1, 11), 99, 98, 97)
    rig.add(GenerationRequest("other", same_head, SamplingParams(max_tokens=1)))
    rig.run_until_idle()
    assert rig.tokens["other", 0] == [98]
    assert rig.cached["other", 0] == 8


def test_choices_wait_a_step_for_the_first_and_read_its_prompt(depth: int) -> None:
    rig = Rig(depth=depth)
    run(rig, make_request("r", 13, 5, n=4))
    assert [(new.num_computed_tokens, new.num_new_tokens) for new in started(rig)] == [(0, 13)] + [(12, 1)] * 3
    assert [len(plan.new) for plan in rig.executor.executed if plan.new] == [1, 3]
    assert num_computed(rig) == 13 + 3 + 4 * 4
    assert {rig.cached["r", choice] for choice in range(4)} == {0, 12}


def test_what_is_shared_is_held_once(depth: int) -> None:
    rig = Rig(depth=depth, num_blocks=20)
    rig.add(make_request("r", 41, 4, n=5))  # 11 blocks each, 10 of them common
    rig.run_until_first_token("r")
    rig.turn()
    assert rig.core.stats().running == 5
    assert rig.core.stats().free_blocks == 20 - 10 - 5
    rig.run_until_idle()
    rig.assert_nothing_left()


def test_a_conversation_finds_its_own_answers(depth: int) -> None:
    rig = Rig(depth=depth)
    question = make_request("question", 6, 10)
    run(rig, question)
    whole = question.prompt_token_ids + tuple(rig.tokens["question", 0])
    run(rig, GenerationRequest("next", (*whole, 50, 51), SamplingParams(max_tokens=2)))
    assert len(whole) == 16
    assert rig.cached["next", 0] == 12  # the sixteenth token was never computed


def test_a_block_that_only_the_step_too_many_fills(depth: int) -> None:
    """With two plans in flight the stop token is computed before it is known to be one: it is cached then."""
    rig = Rig(depth=depth, eos_token_ids=(8,))
    rig.add(make_request("stops", 3, 20))
    rig.run_until_idle()
    assert rig.reasons["stops", 0] is FinishReason.STOP
    rig.add(GenerationRequest("next", (*range(1, 9), 30), SamplingParams(max_tokens=1)))
    rig.run_until_idle()
    assert rig.tokens["next", 0] == [31]
    assert rig.cached["next", 0] == (8 if depth == 2 else 4)


def test_an_aborted_request_leaves_what_it_had_computed(depth: int) -> None:
    rig = Rig(depth=depth, max_num_batched_tokens=16)
    rig.add(make_request("leaves", 100, 4))
    rig.turn()
    rig.turn()
    rig.abort("leaves")
    planned = sum(plan.num_new_tokens for plan in started(rig)) + 16 * (len(rig.executor.executed) + depth - 2)
    rig.run_until_idle()
    run(rig, make_request("again", 100, 4))
    assert rig.cached["again", 0] == planned


@pytest.mark.parametrize(
    ("salts", "shared"),
    [((None, None), True), (("a", "a"), True), ((None, "a"), False), (("a", "b"), False), ((None, ""), False)],
)
def test_salts_keep_requests_apart(depth: int, salts: tuple[str | None, str | None], shared: bool) -> None:
    rig = Rig(depth=depth)
    run(rig, make_request("first", 16, 3, salt=salts[0]))
    run(rig, make_request("second", 16, 3, salt=salts[1]))
    assert rig.cached["second", 0] == (12 if shared else 0)


def test_a_forced_collision_is_seen(depth: int) -> None:
    rig = Rig(depth=depth, block_hash=lambda _: b"all alike")
    run(rig, make_request("first", 16, 3))
    run(rig, make_request("other", 16, 3, first=50), make_request("salted", 16, 3, salt="a"))
    run(rig, make_request("again", 16, 3))
    assert rig.cached == {("first", 0): 0, ("other", 0): 0, ("salted", 0): 0, ("again", 0): 4}


def test_off_means_off(depth: int) -> None:
    rig = Rig(depth=depth, prefix_cache=False)
    run(rig, make_request("first", 16, 3), make_request("second", 16, 3, n=2))
    assert all(new.num_computed_tokens == 0 for new in started(rig))
    stats = rig.core.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits, rig.core.pool.num_cached) == (0, 0, 0)


def test_who_asks_for_prompt_logprobs_computes_them_and_lets_others_read(depth: int) -> None:
    rig = Rig(depth=depth)
    run(rig, make_request("first", 16, 1))
    rig.add(make_request("scored", 17, 1, prompt_logprobs=1), make_request("other", 17, 1))
    rig.core.plan_step()
    assert [new.num_computed_tokens for new in started(rig)][1:] == [0]
    rig.run_until_idle()
    rig.assert_nothing_left()


def test_the_head_of_a_text_outlives_its_tail_and_the_longest_unused_goes_first(depth: int) -> None:
    rig = Rig(depth=depth, num_blocks=10)
    run(rig, make_request("old", 16, 1, first=100))
    run(rig, make_request("new", 16, 1, first=200))
    assert rig.core.pool.num_cached == 8
    run(rig, make_request("other", 16, 1, first=300))  # two free blocks, then the tail of the oldest text
    run(rig, make_request("old again", 16, 1, first=100))  # reads the head of it, and takes the tail of the next
    run(rig, make_request("new again", 13, 1, first=200))
    assert rig.cached["old again", 0] == 8
    assert rig.cached["new again", 0] == 8


def test_a_block_in_use_is_not_given_out(depth: int) -> None:
    rig = Rig(depth=depth, num_blocks=8)
    run(rig, make_request("first", 17, 1))
    rig.add(make_request("reader", 17, 10), make_request("other", 12, 8, first=500))
    rig.run_until_idle()
    assert rig.cached["reader", 0] == 16
    assert rig.tokens["reader", 0] == list(range(18, 28))
    rig.assert_nothing_left()


def test_after_a_loss_of_the_ranks_nothing_is_found(depth: int) -> None:
    rig = Rig(depth=depth)
    run(rig, make_request("before", 16, 3))
    rig.add(make_request("during", 16, 8))
    rig.turn()
    rig.lose_ranks()
    rig.resume()
    rig.run_until_idle()
    assert [new.num_computed_tokens for new in started(rig)][-1] == 0
    assert rig.tokens["during", 0] == list(range(17, 25))
    rig.assert_nothing_left()


def test_a_token_that_is_not_confirmed_is_in_no_text() -> None:
    pool = BlockPool(4, 4)
    cache = PrefixCache(pool, enabled=True)
    sequence = make_sequence(
        make_request("r", 3, 5),
        0,
        sequence_id=SequenceId(0),
        seed=0,
        max_total_tokens=8,
        eos_token_ids=(),
    )
    sequence.blocks = pool.allocate(2)
    sequence.advance(3)
    sequence.advance(1)  # two plans in flight: the second computes what the first samples
    cache.keep(sequence)
    assert not sequence.num_kept_blocks
    sequence.accept((4,))
    cache.keep(sequence)
    pool.free(sequence.blocks)
    assert pool.num_cached == 1


def test_a_text_is_hashed_once(depth: int) -> None:
    hashed: list[bytes] = []

    def counting(data: bytes) -> bytes:
        hashed.append(data)
        return data

    rig = Rig(depth=depth, num_blocks=12, block_hash=counting)
    rig.add(make_request("runs", 30, 15), make_request("waits", 30, 15, first=300))
    rig.run_until_idle()  # the second is looked up in every step until the first has ended
    assert len(hashed) == 2 * (1 + 44 // 4)
