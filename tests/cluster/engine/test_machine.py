"""Any order of submits, aborts, steps and deaths, under any limits: every output is what the sequence gives alone.

The rig checks after each turn that blocks, queues and mirrors agree and that the oldest sequence moves; the
scripted executor, that no step breaks a budget, and that each slot a sequence reads holds its own text.
"""

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cluster.engine.block_hashing import BlockHash, digest
from cluster.generation import FinishReason, GenerationRequest, SamplingParams
from tests.cluster.engine.rig import Key, Rig, make_request
from workers.protocol import SamplingSettings

_EOS = 7
_VOCAB = 40


def mixed(token_ids: Sequence[int], sampling: SamplingSettings) -> int:
    """Depends on every token, the seed and the choice, so that any corrupted context changes the output."""
    key = sum(token_ids) * 40503 + len(token_ids) * 9973 + sampling.seed * 31 + sampling.choice * 5
    return (key * 2654435761 >> 16) % _VOCAB


def alone(request: GenerationRequest, choice: int) -> tuple[list[int], FinishReason]:
    """What a choice gives when it is the only sequence in the world."""
    asked = request.sampling
    assert asked.seed is not None
    assert asked.max_tokens is not None
    stops = {*asked.stop_token_ids} if asked.ignore_eos else {*asked.stop_token_ids, _EOS}
    draw = SamplingSettings(temperature=1.0, top_k=0, top_p=1.0, seed=asked.seed, choice=choice)
    tokens = list(request.prompt_token_ids)
    for _ in range(asked.max_tokens):
        tokens.append(mixed(tokens, draw))
        if tokens[-1] in stops:
            return tokens[len(request.prompt_token_ids) :], FinishReason.STOP
    return tokens[len(request.prompt_token_ids) :], FinishReason.LENGTH


def check_outputs(rig: Rig, requests: dict[str, GenerationRequest], aborted: set[Key]) -> None:
    for key, tokens in rig.tokens.items():
        expected, reason = alone(requests[key[0]], key[1])
        if rig.reasons[key] is FinishReason.ABORT:
            assert key in aborted
            assert tokens == expected[: len(tokens)]
            assert len(tokens) < len(expected) or not expected
        else:
            assert (tokens, rig.reasons[key]) == (expected, reason)


def weak_hash(data: bytes) -> bytes:
    """Five values only: nearly every text collides with another."""
    return bytes([digest(data)[0] % 5])


def check_preemptions_are_bounded(rig: Rig) -> None:
    """Between a return and the next preemption, one ahead has grown by a block or started: no thrash, case 46."""
    orders = [(request.priority, sequence_id) for sequence_id, request in enumerate(rig.asked)]
    events: list[tuple[int, set[tuple[int, int]]]] = [
        (
            plan.incarnation,
            {orders[row.sequence_id] for row in plan.known if row.new_blocks}
            | {orders[n.sequence_id] for n in plan.new},
        )
        for plan in rig.executor.executed
    ]
    came_back: dict[int, int] = {}
    ended: dict[int, int] = {}
    for step, plan in enumerate(rig.executor.executed):
        ended |= dict.fromkeys(plan.ended, step)
        for new in plan.new:
            left, back = ended.pop(new.sequence_id, None), came_back.get(new.sequence_id)
            if left is not None and back is not None and events[left][0] == events[back][0]:
                ahead = {order for _, orders_of_step in events[back + 1 : left + 1] for order in orders_of_step}
                assert min(ahead, default=orders[new.sequence_id]) < orders[new.sequence_id], (
                    f"sequence {new.sequence_id} came back at step {back} and left at {left}, and nobody gained"
                )
            came_back[new.sequence_id] = step


def check_preempted_come_back_for_an_end(rig: Rig) -> None:
    """Without shared blocks and priorities: a preempted sequence waits until an older one has ended for good."""
    ends: dict[int, list[int]] = {}
    incarnation = 0
    for step, plan in enumerate(rig.executor.executed):
        if plan.incarnation != incarnation:  # all come back then, and the oldest first
            incarnation = plan.incarnation
            ends.clear()
        for sequence_id in plan.ended:
            ends.setdefault(sequence_id, []).append(step)
        for new in plan.new:
            if new.sequence_id not in ends:
                continue
            preempted_at = ends[new.sequence_id][-1]
            freed = [older for older in range(new.sequence_id) if preempted_at < ends.get(older, [-1])[-1] <= step]
            assert freed, f"sequence {new.sequence_id} came back at step {step} to what made it leave"


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        depth=st.sampled_from([1, 2]),
        num_blocks=st.integers(4, 24),
        block_size=st.sampled_from([1, 3, 4, 16]),
        max_num_seqs=st.integers(1, 8),
        extra_budget=st.integers(0, 24),
        prefix_cache=st.sampled_from([True, True, True, False]),
        block_hash=st.sampled_from([digest, digest, weak_hash]),
    )
    def start(
        self,
        depth: int,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        extra_budget: int,
        prefix_cache: bool,
        block_hash: BlockHash,
    ) -> None:
        self.rig = Rig(
            depth=depth,
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + extra_budget,
            eos_token_ids=(_EOS,),
            next_token=mixed,
            prefix_cache=prefix_cache,
            block_hash=block_hash,
        )
        self.slots = num_blocks * block_size
        self.requests: dict[str, GenerationRequest] = {}
        self.aborted: set[Key] = set()

    @rule(
        prompt=st.integers(1, 40),
        output=st.integers(0, 40),
        n=st.sampled_from([1, 1, 1, 2, 4]),
        seed=st.integers(0, 1000),
        ignore_eos=st.booleans(),
        stops=st.sampled_from([(), (3,), (3, 11)]),
        first=st.integers(0, 3),
        priority=st.sampled_from([0, 0, 0, -1, 1]),
        salt=st.sampled_from([None, None, "", "a"]),
        reads_cache=st.sampled_from([True, True, False]),
    )
    def submit(
        self,
        prompt: int,
        output: int,
        n: int,
        seed: int,
        ignore_eos: bool,
        stops: tuple[int, ...],
        first: int,
        priority: int,
        salt: str | None,
        reads_cache: bool,
    ) -> None:
        prompt = min(prompt, self.slots)
        self._add(
            make_request(
                f"r{len(self.requests)}",
                prompt,
                min(output, self.slots + 1 - prompt),
                first=first,
                priority=priority,
                salt=salt,
                n=n,
                seed=seed,
                ignore_eos=ignore_eos,
                stop_token_ids=stops,
                logprobs=None if seed % 2 else seed % 3,
                prompt_logprobs=None if reads_cache else 0,
            )
        )

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), more=st.integers(1, 8), same_salt=st.booleans())
    def next_turn(self, data: st.DataObject, more: int, same_salt: bool) -> None:
        """A conversation goes on: what was asked, what came back so far, and something new."""
        before = self.requests[data.draw(st.sampled_from(sorted(self.requests)))]
        text = before.prompt_token_ids + tuple(self.rig.tokens.get((before.request_id, 0), ()))
        text += tuple(range(more))
        if len(text) <= self.slots:
            self._add(
                GenerationRequest(
                    f"r{len(self.requests)}",
                    text,
                    SamplingParams(max_tokens=min(10, self.slots + 1 - len(text)), seed=len(self.requests)),
                    cache_salt=before.cache_salt if same_salt else "b",
                )
            )

    def _add(self, request: GenerationRequest) -> None:
        self.requests[request.request_id] = request
        self.rig.add(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), whole=st.booleans())
    def abort(self, data: st.DataObject, whole: bool) -> None:
        self._abort(data, whole)

    def _abort(self, data: st.DataObject, whole: bool) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        n = self.requests[request_id].sampling.n
        choice = None if whole else data.draw(st.integers(0, n - 1))
        self.aborted |= {(request_id, index) for index in range(n) if choice in (None, index)}
        self.rig.abort(request_id, choice)

    @rule(after=st.integers(0, 3), on_submit=st.booleans())
    def die_soon(self, after: int, on_submit: bool) -> None:
        """In a step that is in flight or still to come, or while its plan is handed out."""
        executor = self.rig.executor
        if on_submit:
            executor.die_on_submit = executor.num_submitted + after
        else:
            executor.die_at_step = executor.num_submitted - len(executor.queued) + after

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), whole=st.booleans(), failures=st.integers(0, 2))
    def abort_while_the_ranks_are_gone(self, data: st.DataObject, whole: bool, failures: int) -> None:
        self.rig.lose_ranks()
        self._abort(data, whole)
        for _ in range(failures):
            self.rig.lose_ranks()
        self.rig.resume()

    @rule(turns=st.integers(1, 12))
    def step(self, turns: int) -> None:
        for _ in range(turns):
            self.rig.turn()

    @invariant()
    def blocks_and_queues_agree(self) -> None:
        self.rig.core.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.rig.run_until_idle()
        self.rig.assert_nothing_left()
        check_outputs(self.rig, self.requests, self.aborted)
        check_preemptions_are_bounded(self.rig)


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    derandomize=True,
    max_examples=80,
    stateful_step_count=40,
)


def live_long(rig: Rig, chance: random.Random, *, rough: bool) -> None:
    """4,000 turns under constant pressure for blocks; a rough life has priorities, choices and deaths in it."""
    requests: dict[str, GenerationRequest] = {}
    aborted: set[Key] = set()
    for _ in range(4000):
        if len(rig.core.scheduler.waiting) < 6 and chance.random() < 0.5:
            name = f"r{len(requests)}"
            more: dict[str, Any] = (
                {"n": chance.choice([1, 1, 2]), "priority": chance.randint(-1, 1)} if rough else {}
            )
            sizes = chance.randint(1, 40), chance.randint(0 if rough else 1, 50)
            requests[name] = make_request(name, *sizes, first=chance.randint(0, 9), seed=len(requests), **more)
            rig.add(requests[name])
        if requests and chance.random() < 0.05:
            name = f"r{max(0, len(requests) - chance.randint(1, 8))}"
            aborted.add((name, 0))
            rig.abort(name, 0)
        if rough and chance.random() < 0.01:
            rig.executor.die_at_step = rig.executor.num_submitted - len(rig.executor.queued) + chance.randint(0, 3)
        rig.turn()
    rig.run_until_idle()
    rig.assert_nothing_left()
    check_outputs(rig, requests, aborted)
    check_preemptions_are_bounded(rig)
    stats = rig.core.stats()
    assert stats.steps > 3500
    assert stats.preemptions > 20
    assert stats.finished[FinishReason.STOP] > 20
    assert stats.finished[FinishReason.ABORT] > 20


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_thousands_of_steps_in_one_life(depth: int, prefix_cache: bool) -> None:
    """Slow leaks need a long life."""
    rig = long_lived(depth, prefix_cache)
    live_long(rig, random.Random(depth), rough=False)
    if not prefix_cache:
        check_preempted_come_back_for_an_end(rig)
    assert (rig.core.stats().prefix_cache_hits > 1000) == prefix_cache


def test_thousands_of_steps_in_a_rough_life(depth: int) -> None:
    rig = long_lived(depth, prefix_cache=True)
    live_long(rig, random.Random(depth), rough=True)
    assert rig.core.stats().recoveries > 20


def long_lived(depth: int, prefix_cache: bool) -> Rig:
    return Rig(
        depth=depth,
        num_blocks=24,
        max_num_seqs=6,
        max_num_batched_tokens=12,
        eos_token_ids=(_EOS,),
        next_token=mixed,
        prefix_cache=prefix_cache,
    )
