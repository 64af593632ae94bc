"""What goes into a step: budgets, order, preemption, two plans in flight, and how long anyone waits."""

import pytest

from cluster.generation import FinishReason
from tests.cluster.engine.rig import Rig, counted, make_request
from workers.protocol import KnownSequence, NewSequence, StepPlan


def rows(plan: StepPlan) -> list[tuple[int, int]]:
    """(sequence, tokens) of each row."""
    changes: list[KnownSequence | NewSequence] = [*plan.known, *plan.new]
    return [(row.sequence_id, row.num_new_tokens) for row in changes]


def test_a_long_prompt_goes_in_chunks_beside_a_decode(depth: int) -> None:
    rig = Rig(depth=depth, max_num_batched_tokens=16)
    rig.add(make_request("short", 2, 50))
    rig.run_until_first_token("short")
    rig.add(make_request("long", 40, 3))
    rig.run_until_first_token("long")
    chunks = [rows(plan) for plan in rig.executor.executed if any(row[0] == 1 for row in rows(plan))]
    assert chunks[:3] == [[(0, 1), (1, 15)], [(0, 1), (1, 15)], [(0, 1), (1, 10)]]
    rig.run_until_idle()
    assert rig.tokens["long", 0] == [41, 42, 43]
    rig.assert_nothing_left()


def test_waiting_prompts_share_a_step_and_seats_are_bounded(depth: int) -> None:
    rig = Rig(depth=depth, max_num_seqs=3)
    rig.add(*(make_request(f"r{i}", 4, 5) for i in range(5)))
    rig.turn()
    plan = (rig.executor.executed or rig.executor.queued)[0]
    assert rows(plan) == [(0, 4), (1, 4), (2, 4)]
    rig.run_until_idle()
    assert all(len(tokens) == 5 for tokens in rig.tokens.values())
    rig.assert_nothing_left()


def test_first_come_first_served_even_when_a_later_one_would_fit(depth: int) -> None:
    rig = Rig(depth=depth, num_blocks=8, block_size=4)
    rig.add(make_request("running", 8, 4), make_request("big", 28, 4), make_request("small", 1, 1))
    rig.turn()
    assert [sequence.request_id for sequence in rig.core.scheduler.running] == ["running"]
    rig.run_until_idle()
    assert list(rig.reasons) == [("running", 0), ("big", 0), ("small", 0)]


def test_a_newcomer_leaves_every_running_sequence_a_block_to_grow_into(depth: int) -> None:
    rig = Rig(depth=depth, num_blocks=6, block_size=4)
    rig.add(make_request("running", 13, 6), make_request("newcomer", 5, 3, first=100))
    rig.run_until_first_token("newcomer")
    assert rig.reasons == {("running", 0): FinishReason.LENGTH}
    assert rig.core.stats().preemptions == 0


def test_a_sequence_is_not_scheduled_past_its_known_end(depth: int) -> None:
    rig = Rig(depth=depth)
    rig.add(make_request("r", 4, 3))
    rig.run_until_idle()
    assert [rows(plan) for plan in rig.executor.executed] == [[(0, 4)], [(0, 1)], [(0, 1)], []]
    assert rig.executor.executed[-1].ended == (0,)
    rig.assert_nothing_left()


def test_an_end_found_a_step_late_is_dropped_and_its_blocks_serve_the_next(depth: int) -> None:
    rig = Rig(depth=depth, num_blocks=4, block_size=4, eos_token_ids=(13,))
    rig.add(make_request("stops", 9, 6), make_request("next", 9, 7, first=20))
    rig.run_until_idle()
    assert rig.tokens["stops", 0] == [10, 11, 12, 13]
    assert rig.reasons["stops", 0] is FinishReason.STOP
    computed = sum(tokens for plan in rig.executor.executed for id_, tokens in rows(plan) if id_ == 0)
    assert computed == 9 + 3 + (depth - 1)  # with two in flight one step too many ran, and is not shown
    assert rig.tokens["next", 0] == list(range(29, 36))
    rig.assert_nothing_left()


def test_the_latest_arrival_is_preempted_and_goes_on_from_its_own_tokens(depth: int) -> None:
    rig = Rig(depth=depth, num_blocks=8, block_size=4)
    requests = [make_request(f"r{i}", 4, 20, first=100 * i) for i in range(3)]
    rig.add(*requests)
    rig.run_until_idle()
    assert rig.core.stats().preemptions >= 1
    for request in requests:
        assert rig.tokens[request.request_id, 0] == counted(request)
    assert next(plan.ended for plan in rig.executor.executed if plan.ended) == (2,)
    again = [n for plan in rig.executor.executed for n in plan.new if n.num_prompt_tokens < len(n.token_ids)]
    assert {new.sequence_id for new in again} == {1, 2}  # the oldest never gives way
    assert any(new.num_computed_tokens for new in again)  # some of what it had is still there
    rig.assert_nothing_left()


def test_the_latest_waits_with_its_blocks_rather_than_preempt_itself(depth: int) -> None:
    rig = Rig(depth=depth, num_blocks=4, block_size=4)
    older, latest = make_request("older", 1, 8), make_request("latest", 4, 8)
    rig.add(older, latest)
    rig.run_until_idle()
    steps = [[row[0] for row in rows(plan)] for plan in rig.executor.executed]
    assert [0] in steps  # the latest stood still for a step or more
    assert rig.core.stats().preemptions == 0
    assert rig.tokens == {("older", 0): counted(older), ("latest", 0): counted(latest)}
    rig.assert_nothing_left()


def test_a_preempted_id_is_ended_on_the_ranks_before_it_comes_back(depth: int) -> None:
    rig = Rig(depth=depth, num_blocks=8, block_size=4)
    rig.add(*(make_request(f"r{i}", 4, 20) for i in range(3)))
    rig.run_until_idle()
    events = [
        kind
        for plan in rig.executor.executed
        for kind, held in (("ended", 2 in plan.ended), ("new", any(new.sequence_id == 2 for new in plan.new)))
        if held
    ]
    assert events == ["new", "ended"] * (len(events) // 2)
    assert len(events) >= 4


def test_abort_frees_blocks_before_the_next_plan(depth: int) -> None:
    rig = Rig(depth=depth, num_blocks=4, block_size=4)
    rig.add(make_request("leaves", 12, 4), make_request("waits", 12, 4))
    for _ in range(3):
        rig.turn()
    assert rig.core.stats().waiting == 1
    rig.abort("leaves")
    rig.abort("leaves")
    rig.abort("never was")
    rig.turn()
    plan = (*rig.executor.executed, *rig.executor.queued)[-1]
    assert plan.ended == (0,)
    assert [new.sequence_id for new in plan.new] == [1]
    rig.run_until_idle()
    assert rig.reasons == {("leaves", 0): FinishReason.ABORT, ("waits", 0): FinishReason.LENGTH}
    rig.assert_nothing_left()


def test_case_16_aborting_a_request_ends_all_its_choices(depth: int) -> None:
    rig = Rig(depth=depth, num_blocks=1000)
    rig.add(make_request("r", 5, 900, n=4))
    rig.run_until_first_token("r")
    rig.turn()
    rig.abort("r", 2)
    assert rig.core.stats().running == 3
    rig.turn()
    rig.abort("r")
    rig.run_until_idle(limit=4)
    assert set(rig.reasons.values()) == {FinishReason.ABORT}
    rig.assert_nothing_left()


def test_choices_of_a_request_share_its_seed_and_differ_in_their_index(depth: int) -> None:
    rig = Rig(depth=depth)
    rig.add(make_request("seeded", 5, 1, n=2, seed=42), make_request("drawn", 5, 1, n=2))
    rig.run_until_idle()
    draws = [new.sampling for plan in rig.executor.executed for new in plan.new]
    assert [(draw.seed, draw.choice) for draw in draws[:2]] == [(42, 0), (42, 1)]
    assert draws[2].seed == draws[3].seed != 42


@pytest.mark.parametrize("priorities", [(0, 0, 0, 0, 0, 0), (2, 1, 0, 0, 1, 2)])
@pytest.mark.parametrize("distance", [100, 0], ids=["other texts", "one text"])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_case_46_pressure_gives_every_output_whole_without_thrash(
    depth: int, prefix_cache: bool, distance: int, priorities: tuple[int, ...]
) -> None:
    rig = Rig(
        depth=depth,
        num_blocks=8,
        block_size=16,
        max_num_batched_tokens=16,
        max_num_seqs=6,
        prefix_cache=prefix_cache,
    )
    requests = [
        make_request(f"r{i}", 12 + i, 48 - i, first=distance * i, priority=priorities[i]) for i in range(6)
    ]
    rig.add(*requests)
    turns = rig.run_until_idle()
    for request in requests:
        assert rig.tokens[request.request_id, 0] == counted(request)
    assert rig.core.stats().preemptions <= 6
    assert turns <= 6 * 60  # no worse than one after the other
    rig.assert_nothing_left()


def test_case_50_prompts_never_hold_up_a_running_stream(depth: int) -> None:
    rig = Rig(depth=depth, num_blocks=2000, max_num_batched_tokens=64)
    rig.add(make_request("stream", 3, 200))
    rig.run_until_first_token("stream")
    for number in range(20):
        rig.add(make_request(f"prompt{number}", 500, 1))
        for _ in range(5):
            rig.turn()
    with_stream = [any(row[0] == 0 for row in rows(plan)) for plan in rig.executor.executed]
    assert all(with_stream)  # one token in every step, and no step above the budget: the executor checks that
    assert rig.core.stats().finished[FinishReason.LENGTH] >= 10  # the prompts go on too


def test_case_50_endless_short_requests_do_not_starve_a_long_prompt(depth: int) -> None:
    rig = Rig(depth=depth, num_blocks=2000, max_num_seqs=8, max_num_batched_tokens=16, max_model_len=2000)
    for number in range(50):
        rig.add(make_request(f"before{number}", 3, 4))
    rig.add(make_request("long", 700, 1))
    turns = 0
    while not rig.tokens.get(("long", 0)):
        rig.add(make_request(f"after{turns}", 3, 4))
        rig.turn()
        turns += 1
    ahead = 50 * 4  # steps of those who came before, even one at a time
    chunks = -(-700 // (16 - 7))  # at least the budget that seven decodes leave
    assert turns <= ahead + chunks + depth


def test_a_prompt_moves_on_when_decodes_fill_all_but_one_token(depth: int) -> None:
    rig = Rig(depth=depth, num_blocks=500, max_num_seqs=4, max_num_batched_tokens=4)
    rig.add(*(make_request(f"s{i}", 1, 100) for i in range(3)), make_request("prompt", 30, 1))
    assert rig.run_until_first_token("prompt") <= 32 + depth


def test_a_preempted_sequence_does_not_come_back_before_the_token_it_awaits_is_known() -> None:
    """Whatever order the loop keeps: else the ranks would sample that token twice."""
    rig = Rig(depth=2, num_blocks=4, block_size=4)
    rig.add(make_request("first", 4, 12), make_request("second", 4, 12))
    scheduler = rig.core.scheduler
    while not scheduler.num_preemptions:
        while len(scheduler.in_flight) > 1:
            rig.core.finish_step(True)
        rig.core.plan_step()
    assert scheduler.waiting[0].num_pending_tokens == 1
    rig.abort("first")  # all blocks are free now
    plan = scheduler.schedule()
    assert plan is None or not plan.new
