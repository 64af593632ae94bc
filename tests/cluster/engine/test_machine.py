"""Any order of submits, aborts and steps, under any limits: every output is what the sequence gives alone.

The rig checks after each turn that blocks, queues and mirrors agree and that the oldest sequence moves; the
scripted executor, that no step breaks a budget and no two sequences share a slot.
"""

import random
from collections.abc import Sequence

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cluster.generation import FinishReason, GenerationRequest
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
            assert len(tokens) < len(expected)
        else:
            assert (tokens, rig.reasons[key]) == (expected, reason)


def check_preemptions_are_bounded(rig: Rig) -> None:
    """A preempted sequence comes back only after an older one has ended for good: no thrash, case 46."""
    ends: dict[int, list[int]] = {}
    for step, plan in enumerate(rig.executor.executed):
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
    )
    def start(self, depth: int, num_blocks: int, block_size: int, max_num_seqs: int, extra_budget: int) -> None:
        self.rig = Rig(
            depth=depth,
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + extra_budget,
            eos_token_ids=(_EOS,),
            next_token=mixed,
        )
        self.slots = num_blocks * block_size
        self.requests: dict[str, GenerationRequest] = {}
        self.aborted: set[Key] = set()

    @rule(
        prompt=st.integers(1, 40),
        output=st.integers(1, 40),
        n=st.sampled_from([1, 1, 1, 2, 4]),
        seed=st.integers(0, 1000),
        ignore_eos=st.booleans(),
        stops=st.sampled_from([(), (3,), (3, 11)]),
    )
    def submit(
        self, prompt: int, output: int, n: int, seed: int, ignore_eos: bool, stops: tuple[int, ...]
    ) -> None:
        prompt = min(prompt, self.slots)
        output = min(output, self.slots + 1 - prompt)
        request = make_request(
            f"r{len(self.requests)}",
            prompt,
            output,
            first=len(self.requests) % 30,
            n=n,
            seed=seed,
            ignore_eos=ignore_eos,
            stop_token_ids=stops,
        )
        self.requests[request.request_id] = request
        self.rig.add(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), whole=st.booleans())
    def abort(self, data: st.DataObject, whole: bool) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        n = self.requests[request_id].sampling.n
        choice = None if whole else data.draw(st.integers(0, n - 1))
        self.aborted |= {(request_id, index) for index in range(n) if choice in (None, index)}
        self.rig.abort(request_id, choice)

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
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


def test_thousands_of_steps_in_one_life(depth: int) -> None:
    """Slow leaks need a long life; this one is under constant pressure for blocks."""
    rig = Rig(
        depth=depth,
        num_blocks=24,
        max_num_seqs=6,
        max_num_batched_tokens=12,
        eos_token_ids=(_EOS,),
        next_token=mixed,
    )
    chance = random.Random(depth)
    requests: dict[str, GenerationRequest] = {}
    aborted: set[Key] = set()
    for _ in range(4000):
        if len(rig.core.scheduler.waiting) < 6 and chance.random() < 0.5:
            name = f"r{len(requests)}"
            sizes = chance.randint(1, 40), chance.randint(1, 50)
            requests[name] = make_request(name, *sizes, first=chance.randint(0, 9), seed=len(requests))
            rig.add(requests[name])
        if requests and chance.random() < 0.05:
            name = f"r{max(0, len(requests) - chance.randint(1, 8))}"
            aborted.add((name, 0))
            rig.abort(name)
        rig.turn()
    rig.run_until_idle()
    rig.assert_nothing_left()
    check_outputs(rig, requests, aborted)
    check_preemptions_are_bounded(rig)
    assert rig.core.stats().preemptions > 20
    assert rig.core.stats().finished[FinishReason.STOP] > 20
    assert rig.core.stats().finished[FinishReason.ABORT] > 20
