"""What one step costs the driver, in microseconds: the engine on scripted ranks that take no time.

Measures, at 1, 32 and 256 running sequences: planning, encoding the plan, decoding the result, applying it,
counting, and the whole turn in its thread. The scripted ranks' own time is taken out.

    python benchmarks/engine_overhead.py [--steps N] [--depth 1|2]
"""

import argparse
import statistics
import threading
import time
from collections.abc import Sequence

from cluster.engine.config import EngineConfig
from cluster.engine.core import EngineCore
from cluster.engine.executor import Capacity
from cluster.engine.loop import Engine
from cluster.engine.outputs import apply_result
from cluster.generation import GenerationRequest, SamplingParams, TokenDelta
from tests.fakes.scripted_executor import ScriptedExecutor
from workers.codec import decode, encode
from workers.protocol import StepPlan, StepResult

_PROMPT_TOKENS = 128
_BLOCK_SIZE = 16


class TimedExecutor(ScriptedExecutor):
    """Adds up the CPU time that the scripted ranks take, to be subtracted."""

    busy_s: float = 0.0

    def submit(self, plan: StepPlan) -> None:
        start = time.thread_time()
        super().submit(plan)
        self.busy_s += time.thread_time() - start

    def take_result(self, timeout_s: float) -> StepResult:
        start = time.thread_time()
        result = super().take_result(timeout_s)
        self.busy_s += time.thread_time() - start
        return result


def make_executor(num_sequences: int, steps: int) -> TimedExecutor:
    blocks_each = (_PROMPT_TOKENS + steps) // _BLOCK_SIZE + 2
    return TimedExecutor(
        Capacity(num_sequences * blocks_each + num_sequences, _BLOCK_SIZE), verify=False, keep_executed=False
    )


def make_config(num_sequences: int, depth: int) -> EngineConfig:
    return EngineConfig(
        max_model_len=100_000,
        max_num_seqs=num_sequences,
        max_num_batched_tokens=max(2048, num_sequences),
        max_steps_in_flight=depth,
        heartbeat_interval_s=60.0,
    )


def make_request(number: int, max_tokens: int) -> GenerationRequest:
    prompt = tuple(range(number, number + _PROMPT_TOKENS))
    return GenerationRequest(f"request-{number}", prompt, SamplingParams(max_tokens=max_tokens))


def measure_parts(num_sequences: int, steps: int, depth: int) -> dict[str, float]:
    """Median microseconds of each part of a decode step, one part at a time."""
    executor = make_executor(num_sequences, 4 * steps)
    core = EngineCore(executor, make_config(num_sequences, depth), time.monotonic)
    for number in range(num_sequences):
        core.add(make_request(number, 3 * steps))
    while len(core.scheduler.running) < num_sequences or core.scheduler.running[-1].num_tokens_left_to_compute > 1:
        core.finish_step(core.plan_step())
    while core.scheduler.in_flight:
        apply_result(core.scheduler, executor.take_result(1.0))

    times: dict[str, list[float]] = {}

    def timed(name: str, start: float) -> float:
        now = time.perf_counter()
        times.setdefault(name, []).append((now - start) * 1e6)
        return now

    for _ in range(steps):
        start = time.perf_counter()
        plan = core.scheduler.schedule()
        assert plan is not None
        start = timed("schedule", start)
        encoded = encode(plan)
        timed("encode plan", start)
        executor.submit(plan)
        answer = encode(executor.take_result(1.0))
        start = time.perf_counter()
        result = decode(answer)
        start = timed("decode result", start)
        assert isinstance(result, StepResult)
        deltas = apply_result(core.scheduler, result)
        start = timed("apply result", start)
        core._forget_finished(deltas)
        core.stats()
        timed("count, snapshot", start)
    medians = {name: statistics.median(values) for name, values in times.items()}
    medians["plan bytes"] = float(len(encoded))
    return medians


def measure_loop(num_sequences: int, steps: int, depth: int) -> float:
    """Mean CPU microseconds of a whole turn, prefill and publishing included, without the ranks'."""
    executor = make_executor(num_sequences, steps)
    done = threading.Event()
    left = num_sequences

    def publish(deltas: Sequence[TokenDelta]) -> None:
        nonlocal left
        left -= sum(delta.finish_reason is not None for delta in deltas)
        if left == 0:
            done.set()

    engine = Engine(executor, make_config(num_sequences, depth), publish)
    for number in range(num_sequences):  # queued before the thread starts, so that no submit is measured
        engine._commands.append(make_request(number, steps))
        engine._accepted.add(f"request-{number}")
    start = time.process_time()
    engine.start()
    assert done.wait(120)
    elapsed = time.process_time() - start - executor.busy_s
    num_steps = engine.stats().steps
    engine.stop()
    return elapsed / num_steps * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--depth", type=int, default=2, choices=(1, 2))
    arguments = parser.parse_args()
    print(f"microseconds a step, {arguments.depth} in flight, {arguments.steps} steps")
    for num_sequences in (1, 32, 256):
        parts = measure_parts(num_sequences, arguments.steps, arguments.depth)
        num_bytes = parts.pop("plan bytes")
        turn = measure_loop(num_sequences, arguments.steps, arguments.depth)
        line = ", ".join(f"{name} {value:.0f}" for name, value in parts.items())
        total = sum(parts.values())
        print(
            f"{num_sequences:4d} running: {total:6.0f} ({total / num_sequences:.2f} a sequence): {line}; "
            f"plan {num_bytes:.0f} bytes; turn of the loop, no codec {turn:.0f}"
        )


if __name__ == "__main__":
    main()
