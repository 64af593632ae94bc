"""The engine without its thread: live requests, and one turn of the wheel at a time.

Knows requests, plans and results; knows nothing of threads, locks, text, HTTP, Ray or torch.
"""

import secrets
from collections.abc import Callable, Iterator

from cluster.engine.admission import max_total_tokens
from cluster.engine.block_pool import BlockPool
from cluster.engine.config import EngineConfig
from cluster.engine.executor import Executor
from cluster.engine.lateness import Lateness
from cluster.engine.outage import OutageReport
from cluster.engine.outputs import apply_result, final_delta
from cluster.engine.scheduler import Scheduler
from cluster.engine.sequence import Sequence, make_sequence
from cluster.engine.stats import Counters, EngineStats
from cluster.generation import FinishReason, GenerationRequest, TokenDelta
from workers.protocol import SequenceId, StepPlan, StepTimings

_SEED_BITS = 63


class EngineCore:
    """Owned by one thread. Every choice of an added request gets exactly one delta with a reason, its last."""

    def __init__(self, executor: Executor, config: EngineConfig, clock: Callable[[], float]) -> None:
        self._executor = executor
        self._config = config
        self._clock = clock
        self._capacity = executor.capacity
        self.pool = BlockPool(self._capacity.num_blocks, self._capacity.block_size)
        self.scheduler = Scheduler(config, self.pool, executor.incarnation)
        self.lateness = Lateness(config, clock)
        self._requests: dict[str, dict[int, Sequence]] = {}  # live choices of live requests
        self._not_started: set[str] = set()
        self._counters = Counters()
        self._last_outage: OutageReport | None = None
        self._next_id = 0
        self._was_idle = True

    @property
    def idle(self) -> bool:
        return not self.scheduler.has_work

    def __contains__(self, request_id: str) -> bool:
        """Whether a choice of this request still lives."""
        return request_id in self._requests

    def add(self, request: GenerationRequest) -> None:
        """Queue one sequence a choice. An unseeded request gets its seed here, so that a replay draws the same."""
        seed = request.sampling.seed
        if seed is None:
            seed = secrets.randbits(_SEED_BITS)
        limit = max_total_tokens(request, self._config, self._capacity)
        choices: dict[int, Sequence] = {}
        for choice in range(request.sampling.n):
            choices[choice] = make_sequence(
                request,
                choice,
                sequence_id=SequenceId(self._next_id),
                seed=seed,
                max_total_tokens=limit,
                eos_token_ids=self._config.eos_token_ids,
            )
            self._next_id += 1
            self.scheduler.add(choices[choice])
        self._requests[request.request_id] = choices
        self._not_started.add(request.request_id)
        self._counters.received += len(choices)
        self._counters.prompt_tokens += len(request.prompt_token_ids)

    def end(self, request_id: str, choice: int | None, reason: FinishReason) -> list[TokenDelta]:
        """End one choice, or all of them (None). Unknown and finished ones are ignored."""
        live = self._requests.get(request_id, {})
        chosen = list(live.values()) if choice is None else [live[choice]] if choice in live else []
        return self._end(chosen, reason)

    def fail_all(self, error: str) -> list[TokenDelta]:
        """End every live choice by our fault."""
        return self._end(list(self._live()), FinishReason.ERROR, error)

    def plan_step(self) -> bool:
        """Plan the next step and hand it to the ranks. Whether there was one to plan. Raises `ExecutorFailed`."""
        plan = self.scheduler.schedule()
        if plan is not None:
            self._hand_out(plan)
        return plan is not None

    def finish_step(self, planned: bool) -> list[TokenDelta]:
        """Wait for the oldest step in flight when no more may be planned before it. Raises `ExecutorFailed`."""
        in_flight = len(self.scheduler.in_flight)
        if in_flight and (not planned or in_flight >= self._config.max_steps_in_flight):
            return self._take_result()
        assert planned or self.idle, "sequences live, no step is in flight, and none can be planned"
        return []

    def heartbeat(self) -> None:
        """Hand out a step without sequences; its result is taken by `finish_step`. Raises `ExecutorFailed`."""
        self._hand_out(self.scheduler.heartbeat())

    def lose_ranks(self) -> None:
        """After a failure: what lives waits for other ranks. Requests may come and go meanwhile."""
        self.scheduler.forget_ranks()
        self.lateness.forget()
        self._was_idle = True

    def end_suspects(self, cause: str) -> list[TokenDelta]:
        """End the requests that kill the ranks, as far as that is known. All choices: they have one prompt."""
        deltas: list[TokenDelta] = []
        for suspect in self.scheduler.suspects.found():
            error = (
                f"the ranks failed {suspect.num_strikes} times while they computed this request, and no other "
                f"the last times: {cause}"
            )
            live = self._requests.get(suspect.request_id, {})
            deltas += self._end(list(live.values()), FinishReason.ERROR, error)
        return deltas

    def resume(self) -> None:
        """The executor has a new incarnation: every live sequence goes on from its confirmed tokens."""
        assert self._executor.capacity == self._capacity, "what was accepted must still fit"
        self.scheduler.begin(self._executor.incarnation)
        self._counters.recoveries += 1

    def note_outage(self, report: OutageReport) -> None:
        """One is over."""
        self._last_outage = report
        self._counters.outage_seconds += report.seconds

    def stats(self) -> EngineStats:
        scheduler, counters = self.scheduler, self._counters
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            waiting_requests=len(self._not_started),
            free_blocks=self.pool.num_free,
            cached_blocks=self.pool.num_cached,
            total_blocks=self.pool.num_blocks,
            started_requests=counters.started_requests,
            received=counters.received,
            finished=counters.finished.copy(),
            preemptions=scheduler.num_preemptions,
            recoveries=counters.recoveries,
            last_outage=self._last_outage,
            outage_seconds=counters.outage_seconds,
            prompt_tokens=counters.prompt_tokens,
            prefix_cache_queries=scheduler.prefix_cache.num_queried_tokens,
            prefix_cache_hits=scheduler.prefix_cache.num_hit_tokens,
            generation_tokens=counters.generation_tokens,
            steps=counters.steps,
            last_step_at=counters.last_step_at,
            step_seconds=counters.step_seconds.snapshot(),
            busy=counters.busy,
        )

    def check_integrity(self) -> None:
        """Raises AssertionError when blocks, queues and tables disagree."""
        scheduler = self.scheduler
        self.pool.check_integrity(sequence.blocks for sequence in scheduler.running)
        assert all(not sequence.blocks for sequence in scheduler.waiting), "a waiting sequence holds blocks"
        queued = [*scheduler.running, *scheduler.waiting]
        for queue in (scheduler.running, scheduler.waiting):
            orders = [sequence.order for sequence in queue]
            assert orders == sorted(orders), f"out of order: {orders}"
        last_running = {sequence.priority: sequence.order for sequence in scheduler.running}
        for sequence in scheduler.waiting:
            last = last_running.get(sequence.priority)
            assert last is None or last < sequence.order, f"{last} runs, and {sequence.order} waits"
        assert {id(sequence) for sequence in queued} == {id(sequence) for sequence in self._live()}
        assert self._not_started <= self._requests.keys()

    def _live(self) -> Iterator[Sequence]:
        for choices in self._requests.values():
            yield from choices.values()

    def _hand_out(self, plan: StepPlan) -> None:
        self._executor.submit(plan)
        if plan.new and self._not_started:
            num_before = len(self._not_started)
            for sequence in self.scheduler.admitted:
                self._not_started.discard(sequence.request_id)
            self._counters.started_requests += num_before - len(self._not_started)

    def _take_result(self) -> list[TokenDelta]:
        plan, _ = self.scheduler.in_flight[0]
        self.lateness.begin(plan)
        result = self._executor.take_result(self._deadline_s(plan))
        self.lateness.end()
        deltas = apply_result(self.scheduler, result)
        self._forget_finished(deltas)
        self._counters.steps += 1
        self._counters.last_step_at = self._clock()
        self._count_timings(plan, result.timings)
        return deltas

    def _deadline_s(self, plan: StepPlan) -> float:
        """A step without rows is a collective or two, however long a prompt may take."""
        if plan.new or plan.known:
            return self._config.step_deadline_s
        return min(self._config.step_deadline_s, self._config.heartbeat_deadline_s)

    def _count_timings(self, plan: StepPlan, timings: StepTimings) -> None:
        """Ranks that were idle before had waited for work rather than for the driver."""
        if plan.new or plan.known:
            self._counters.count_timings(timings, at_once=not self._was_idle)
        self._was_idle = not (self.scheduler.in_flight or self.scheduler.running or self.scheduler.waiting)

    def _end(self, sequences: list[Sequence], reason: FinishReason, error: str | None = None) -> list[TokenDelta]:
        for sequence in sequences:
            self.scheduler.finish(sequence, reason)
        deltas = [final_delta(sequence, reason, error) for sequence in sequences]
        self._forget_finished(deltas)
        return deltas

    def _forget_finished(self, deltas: list[TokenDelta]) -> None:
        self._counters.count_deltas(deltas)
        for delta in deltas:
            if delta.finish_reason is None:
                continue
            choices = self._requests[delta.request_id]
            del choices[delta.choice]
            if not choices:
                del self._requests[delta.request_id]
                self._not_started.discard(delta.request_id)
