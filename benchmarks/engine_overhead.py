"""What one step costs beside the model, in microseconds: the engine on scripted ranks that take no time.

Measures, at 1, 32 and 256 running sequences: in the driver planning, encoding the plan and sending it to two
ranks, decoding the result, applying it, counting, and encoding the deltas; in the ingress decoding these and
turning tokens into text, with SmolLM2's tokenizer; and the whole turn of the engine's thread, without the time of
the scripted ranks.

    python -m benchmarks.engine_overhead [--steps N] [--depth 1|2]
"""

import argparse
import multiprocessing
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from cluster.driver import delta_codec
from cluster.driver.delta_codec import Deltas
from cluster.engine.config import EngineConfig
from cluster.engine.core import EngineCore
from cluster.engine.executor import Capacity
from cluster.engine.loop import Engine
from cluster.engine.outputs import apply_result
from cluster.generation import GenerationRequest, SamplingParams, TokenDelta
from cluster.text.choice import RequestText
from cluster.text.tokenizer import Tokenizer, load_tokenizer
from model_shards.sources import resolve_model
from tests.fakes.scripted_executor import ScriptedExecutor
from workers import codec
from workers.channel import DriverChannel, WorkerChannel, WorkerEndpoint
from workers.protocol import StepPlan, StepResult, StopWorkers

_PROMPT_TOKENS = 128
_BLOCK_SIZE = 16
_RANKS = 2
_WARM_UP = 20
_PATIENCE_S = 60.0

Parts = dict[str, float]


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


@contextmanager
def draining_ranks() -> Iterator[DriverChannel]:
    """A step channel whose ranks, in one other process, read every plan and do nothing."""
    context = multiprocessing.get_context("spawn")
    channel = DriverChannel(_RANKS, 0)
    ranks = context.Process(target=drain, args=(channel.endpoints,), daemon=True)
    ranks.start()
    try:
        yield channel
        channel.send(StopWorkers(0))
        ranks.join(_PATIENCE_S)
    finally:
        ranks.kill()
        channel.close()


def drain(endpoints: tuple[WorkerEndpoint, ...]) -> None:
    channels = [WorkerChannel(endpoint) for endpoint in endpoints]
    while all(isinstance(channel.receive(_PATIENCE_S), StepPlan) for channel in channels):
        pass


class Stopwatch:
    """Microseconds of named parts, step by step."""

    def __init__(self) -> None:
        self._times: dict[str, list[float]] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._times.setdefault(name, []).append((time.perf_counter() - start) * 1e6)

    def medians(self) -> dict[str, float]:
        return {name: statistics.median(values) for name, values in self._times.items()}


def prefilled(
    num_sequences: int, steps: int, depth: int
) -> tuple[EngineCore, TimedExecutor, list[GenerationRequest]]:
    """An engine of which every sequence decodes, with nothing in flight."""
    executor = make_executor(num_sequences, 2 * steps)
    core = EngineCore(executor, make_config(num_sequences, depth), time.monotonic)
    requests = [make_request(number, 2 * steps) for number in range(num_sequences)]
    for request in requests:
        core.add(request)
    while len(core.scheduler.running) < num_sequences or core.scheduler.running[-1].num_tokens_left_to_compute > 1:
        core.finish_step(core.plan_step())
    while core.scheduler.in_flight:
        apply_result(core.scheduler, executor.take_result(1.0))
    return core, executor, requests


def measure_parts(num_sequences: int, steps: int, depth: int, tokenizer: Tokenizer) -> tuple[Parts, Parts, int]:
    """Median microseconds of each part of a decode step, one part at a time: the driver's, the ingress's; and the
    bytes of a plan.
    """
    core, executor, requests = prefilled(num_sequences, steps + _WARM_UP, depth)
    first_step = executor.num_submitted
    texts = {request.request_id: RequestText(request, tokenizer) for request in requests}
    driver, ingress = Stopwatch(), Stopwatch()
    with draining_ranks() as channel:
        for step in range(-_WARM_UP, steps):
            if step == 0:
                driver, ingress = Stopwatch(), Stopwatch()
            with driver.part("schedule"):
                plan = core.scheduler.schedule()
            assert plan is not None
            sent = replace(plan, step=plan.step - first_step)  # the channel counts from its own beginning
            with driver.part("encode and send"):
                channel.send(sent)
            executor.submit(plan)
            answer = codec.encode(executor.take_result(1.0))
            with driver.part("decode result"):
                result = codec.decode(answer)
            assert isinstance(result, StepResult)
            with driver.part("apply result"):
                deltas = apply_result(core.scheduler, result)
            with driver.part("count, snapshot"):
                core._forget_finished(deltas)
                core._count_timings(plan, result.timings)
                core.stats()
            with driver.part("encode deltas"):
                message = delta_codec.encode(Deltas(tuple(deltas)))
            with ingress.part("decode deltas"):
                received = delta_codec.decode(message)
            assert isinstance(received, Deltas)
            with ingress.part("detokenize"):
                for delta in received.deltas:
                    texts[delta.request_id].push(delta)
    return driver.medians(), ingress.medians(), len(codec.encode(sent))


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
    tokenizer = load_tokenizer(resolve_model("smollm2-135m"))
    print(f"microseconds a step, {arguments.depth} in flight, {_RANKS} ranks, {arguments.steps} steps")
    for num_sequences in (1, 32, 256):
        driver, ingress, num_bytes = measure_parts(num_sequences, arguments.steps, arguments.depth, tokenizer)
        turn = measure_loop(num_sequences, arguments.steps, arguments.depth)
        print(f"{num_sequences:4d} running, plan of {num_bytes} bytes; turn of the loop without codec {turn:.0f}")
        for place, parts in (("driver", driver), ("ingress", ingress)):
            total = sum(parts.values())
            line = ", ".join(f"{name} {value:.0f}" for name, value in parts.items())
            print(f"     {place:7s} {total:6.0f} ({total / num_sequences:.2f} a sequence): {line}")


if __name__ == "__main__":
    main()
