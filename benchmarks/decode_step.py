"""Where the time of a step goes on CPU: decodes of 1, 8 and 32 sequences and a prompt of 1,024 tokens.

    python -m benchmarks.decode_step [MODEL] [--tp N] [--dtype float32]

Each rank is a process with its share of the cores, around the runner alone: no driver, no wire. Rank 0's parts of
the median step, in milliseconds, beside the wall: the time that memory needs to hand over the weights once, at the
rate that this machine copies 256 MB. `kernels` is the time inside matrix products and attention of one profiled
step; what is left of `forward` is small operations and Python.
"""

import argparse
import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from model_shards.cpu_kernels.kernels import CpuKernels
from model_shards.sources import resolve_model
from model_shards.weights.loader import load_model
from workers.config import Dtype, WorkerConfig
from workers.device import set_threads, threads_per_rank, torch_dtype
from workers.process_group import TimedGroup, join_group, open_group
from workers.protocol import KnownSequence, NewSequence, SamplingSettings, SequenceId, StepPlan, StepTimings
from workers.runner import Runner

CONTEXT = 192  # halfway through 128 in, 128 out
BATCHES = (1, 8, 32)
PROMPT = 1024
CHUNK = 512
STEPS = 15
BLOCK_SIZE = 16
DEADLINE_S = 120.0
GREEDY = SamplingSettings(temperature=0.0, top_k=0, top_p=1.0, seed=0, choice=0)
PARTS = ("prepare", "forward", "collectives", "sample")


class Bench:
    """One rank's runner and its own count of steps and blocks; all ranks make the same plans."""

    def __init__(self, model_path: Path, group: TimedGroup, dtype: Dtype) -> None:
        self.model = load_model(model_path, group, device=torch.device("cpu"), dtype=torch_dtype(dtype))
        self.config = WorkerConfig(
            model_path=str(model_path),
            tensor_parallel_size=group.size,
            device="cpu",
            dtype=dtype,
            block_size=BLOCK_SIZE,
            max_model_len=2 * PROMPT,
            max_num_seqs=max(BATCHES),
            max_num_batched_tokens=max(CHUNK, *BATCHES),
        )
        self.group = group

    def runner(self) -> Runner:
        return Runner(self.model, self.group, self.config, num_blocks=max(BATCHES) * (2 * CONTEXT // BLOCK_SIZE))

    def decode(self, batch: int) -> tuple[StepTimings, dict[str, float]]:
        """The parts of the median decode step of `batch` sequences, and its kernels' milliseconds."""
        runner = self.runner()
        blocks = 2 * CONTEXT // BLOCK_SIZE
        for number in range(batch):
            runner.execute(StepPlan(0, number, new=(sequence(number, CONTEXT, CONTEXT, blocks),)))
        plan = StepPlan(0, 0, known=tuple(KnownSequence(SequenceId(number), 1) for number in range(batch)))
        steps = [runner.execute(plan).timings for _ in range(STEPS)]
        with profile(activities=[ProfilerActivity.CPU]) as profiled, compiled_attention() as spent:
            runner.execute(plan)
        inside = kernels(profiled)
        inside["attention"] += sum(spent) * 1e3
        return median(steps[2:]), inside

    def prefill(self) -> float:
        """Seconds for a prompt of 1,024 tokens in chunks of 512."""
        seconds = []
        for _ in range(3):
            runner = self.runner()
            started = time.perf_counter()
            runner.execute(StepPlan(0, 0, new=(sequence(0, PROMPT, CHUNK, PROMPT // BLOCK_SIZE),)))
            runner.execute(StepPlan(0, 1, known=(KnownSequence(SequenceId(0), CHUNK),)))
            seconds.append(time.perf_counter() - started)
        return min(seconds)


def sequence(number: int, length: int, num_new: int, num_blocks: int) -> NewSequence:
    token_ids = tuple(1000 + (number * 31 + place * 7) % 5000 for place in range(length))
    blocks = tuple(range(number * num_blocks, (number + 1) * num_blocks))
    return NewSequence(SequenceId(number), token_ids, length, GREEDY, blocks, 0, num_new)


def median(steps: list[StepTimings]) -> StepTimings:
    """The step whose whole is the median of all."""
    ordered = sorted(steps, key=lambda timings: sum(astuple(timings)))
    return ordered[len(ordered) // 2]


def kernels(profiled: profile) -> dict[str, float]:
    """Milliseconds of matrix products and of attention's own operations."""
    groups = {
        "products": ("mkldnn::_linear_pointwise", "aten::addmm", "aten::mm"),
        "attention": ("aten::_scaled_dot_product_flash_attention_for_cpu",),
        "gather": ("aten::index_select",),
    }
    found = {event.key: event.cpu_time_total / 1e3 for event in profiled.key_averages()}
    return {name: sum(found.get(key, 0.0) for key in keys) for name, keys in groups.items()}


@contextmanager
def compiled_attention() -> Iterator[list[float]]:
    """Seconds of each call of the compiled kernel, which is no operation of torch that its profiler could see."""
    spent: list[float] = []

    def timed(kernels: CpuKernels, *arguments: Any) -> Tensor:
        started = time.perf_counter()
        result = attend(kernels, *arguments)
        spent.append(time.perf_counter() - started)
        return result

    attend = CpuKernels.attend
    CpuKernels.attend = timed  # type: ignore[method-assign, assignment]
    try:
        yield spent
    finally:
        CpuKernels.attend = attend  # type: ignore[method-assign]


def memory_rate() -> float:
    """Bytes a second at which this process reads memory while it copies: reading and writing are both counted."""
    source = torch.ones(64 * 2**20)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - started)
    return 2 * source.nbytes / min(seconds)


def heading(bench: Bench) -> str:
    weights = sum(layout.local_size(0) for layout in bench.model.layout.values())
    weight_bytes = weights * torch_dtype(bench.config.dtype).itemsize
    rate = memory_rate()
    return (
        f"rank 0 of {bench.group.size}, {torch.get_num_threads()} threads, {bench.config.dtype}: "
        f"{weight_bytes / 1e6:.0f} MB of weights at {rate / 1e9:.0f} GB/s: "
        f"wall {weight_bytes / rate * 1e3:.1f} ms\n"
        f"{'sequences':>9} {'step':>7} " + " ".join(f"{part:>11}" for part in PARTS) + "   kernels"
    )


def line(batch: int, timings: StepTimings, inside: dict[str, float]) -> str:
    parts = [getattr(timings, part) * 1e3 for part in PARTS]
    columns = " ".join(f"{part:>11.2f}" for part in parts)
    return f"{batch:>9} {sum(parts):>7.1f} {columns}   " + ", ".join(
        f"{name} {value:.1f}" for name, value in inside.items()
    )


def rank_main(rank: int, size: int, model_path: Path, dtype: Dtype, address: "multiprocessing.Queue[str]") -> None:
    set_threads(threads_per_rank(size))
    group = join(rank, size, address)
    say = print if rank == 0 else lambda _: None
    try:
        bench = Bench(model_path, group, dtype)
        say(heading(bench))
        for batch in BATCHES:
            say(line(batch, *bench.decode(batch)))
        seconds = bench.prefill()
        say(f"prompt of {PROMPT} tokens by {CHUNK}: {seconds * 1e3:.0f} ms, {PROMPT / seconds:.0f} tok/s")
    finally:
        group.close()


def join(rank: int, size: int, address: "multiprocessing.Queue[str]") -> TimedGroup:
    rendezvous = None
    if rank == 0:
        rendezvous = open_group(size, "cpu", same_host=True, host="127.0.0.1", deadline_s=DEADLINE_S)
        for _ in range(size):
            address.put(rendezvous.address)
    place = address.get(timeout=DEADLINE_S)
    group = TimedGroup()
    group.attach(
        join_group(place, rank, size, deadline_s=DEADLINE_S, step_deadline_s=DEADLINE_S, rendezvous=rendezvous)
    )
    return group


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    arguments = parser.parse_args()
    model_path = resolve_model(arguments.model, on_progress=print)
    dtype = cast(Literal["float32", "bfloat16"], arguments.dtype)
    context = multiprocessing.get_context("spawn")
    address = context.Queue()
    ranks = [
        context.Process(target=rank_main, args=(rank, arguments.tp, model_path, dtype, address))
        for rank in range(arguments.tp)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()


if __name__ == "__main__":
    main()
