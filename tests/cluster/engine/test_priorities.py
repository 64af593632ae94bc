"""Lower priorities first, first come first served within one, and nobody of the highest is kept from going on."""

import pytest

from cluster.generation import FinishReason
from tests.cluster.engine.rig import Rig, counted, make_request
from workers.protocol import KnownSequence, NewSequence, StepPlan


def rows_of(plan: StepPlan) -> list[NewSequence | KnownSequence]:
    return [*plan.new, *plan.known]


def names(rig: Rig) -> list[str]:
    return [sequence.request_id for sequence in rig.core.scheduler.running]


def ends(rig: Rig) -> list[str]:
    return [request_id for request_id, _ in rig.reasons]


def test_who_waits_starts_by_priority_and_then_by_arrival(depth: int) -> None:
    rig = Rig(depth=depth, max_num_seqs=1)
    for name, priority in (("b0", 0), ("c", 1), ("a0", -5), ("b1", 0), ("a1", -5)):
        rig.add(make_request(name, 4, 3, priority=priority))
    rig.run_until_idle()
    assert ends(rig) == ["a0", "a1", "b0", "b1", "c"]
    assert rig.core.stats().preemptions == 0
    rig.assert_nothing_left()


def test_a_higher_priority_takes_the_seat_of_the_latest_of_the_lowest(depth: int) -> None:
    rig = Rig(depth=depth, max_num_seqs=3)
    rig.add(*(make_request(name, 5, 30, priority=p, first=100 * p) for name, p in (("x", 1), ("y", 2), ("z", 2))))
    rig.run_until_first_token("z")
    rig.add(make_request("first", 5, 4, first=400))
    rig.turn()
    assert names(rig) == ["first", "x", "y"]
    rig.run_until_idle()
    assert ends(rig) == ["first", "x", "y", "z"]
    assert rig.core.stats().preemptions == 1
    assert len(rig.tokens["z", 0]) == 30
    rig.assert_nothing_left()


def test_an_equal_priority_waits_for_its_turn(depth: int) -> None:
    rig = Rig(depth=depth, max_num_seqs=2, num_blocks=8)
    rig.add(make_request("x", 5, 10), make_request("y", 5, 10), make_request("z", 20, 2))
    rig.run_until_idle()
    assert ends(rig)[-1] == "z"
    assert rig.core.stats().preemptions == 0


def test_a_higher_priority_takes_the_blocks_it_needs_and_no_more(depth: int) -> None:
    rig = Rig(depth=depth, num_blocks=24, max_num_seqs=8)
    rig.add(*(make_request(f"low{i}", 12, 20, priority=1, first=100 * i) for i in range(4)))
    rig.run_until_first_token("low3")
    rig.add(make_request("high", 36, 4, first=500))
    rig.turn()
    assert names(rig) == ["high", "low0", "low1", "low2"]
    assert rig.run_until_first_token("high") <= 36 // (16 - 3) + 1 + depth
    rig.run_until_idle()
    for i in range(4):
        assert rig.tokens[f"low{i}", 0] == list(range(100 * i + 12, 100 * i + 32))
    rig.assert_nothing_left()


def test_who_grows_takes_from_the_lowest_priority_even_if_it_came_first(depth: int) -> None:
    rig = Rig(depth=depth, num_blocks=8)
    low, high = make_request("low", 4, 20, priority=1), make_request("high", 4, 20, first=100)
    rig.add(low)
    rig.turn()
    rig.add(high)
    rig.run_until_idle()
    assert ends(rig) == ["high", "low"]
    assert rig.core.stats().preemptions >= 1
    assert rig.tokens == {("low", 0): counted(low), ("high", 0): counted(high)}


def test_lower_ones_go_on_while_a_higher_one_could_not_start_even_without_them(depth: int) -> None:
    rig = Rig(depth=depth, num_blocks=16)
    rig.add(make_request("ahead", 30, 12), make_request("low", 4, 8, priority=1, first=300))
    rig.run_until_first_token("low")
    rig.add(make_request("big", 40, 2, first=500))  # 10 blocks; the one ahead keeps 8
    rig.turn()
    assert names(rig) == ["ahead", "low"]
    rig.run_until_idle()
    assert ends(rig) == ["low", "ahead", "big"]
    assert rig.core.stats().preemptions == 0


def test_a_long_prompt_of_low_priority_gives_its_budget_away(depth: int) -> None:
    rig = Rig(depth=depth, num_blocks=500, max_num_batched_tokens=16)
    rig.add(make_request("long", 600, 1, priority=1))
    rig.turn()
    rig.add(make_request("high", 40, 1, first=2))
    assert rig.run_until_first_token("high") <= 3 + depth
    rig.run_until_idle()
    rig.assert_nothing_left()


@pytest.mark.parametrize("num_blocks", [8, 9, 30])
def test_an_endless_stream_of_low_ones_delays_a_high_one_by_a_bounded_number_of_steps(
    depth: int, num_blocks: int
) -> None:
    rig = Rig(depth=depth, num_blocks=num_blocks, max_num_seqs=6, max_num_batched_tokens=8)
    for number in range(40):
        rig.add(make_request(f"low{number}", 7, 9, priority=3, first=10 * number))
        if number == 20:
            rig.add(make_request("high", 24, 8, priority=2, first=900))
            since = len(rig.executor.executed)
        rig.turn()
    rig.run_until_idle()
    steps = [
        (step, row.num_new_tokens)
        for step, plan in enumerate(rig.executor.executed)
        for row in rows_of(plan)
        if rig.asked[row.sequence_id].request_id == "high"
    ]
    start = steps[0][0]
    assert start <= since + depth
    assert [step for step, _ in steps] == list(range(start, start + len(steps)))  # from then on in every step
    assert sum(num_tokens for _, num_tokens in steps) == 24 + 7  # and nothing twice
    assert rig.core.stats().finished[FinishReason.LENGTH] == 41
    rig.assert_nothing_left()
