"""Checks and measures the GPU path on one GPU: run by scripts/gpu-check, which says what for.

Each part prints what it found and stands for itself: one that fails is reported and the next one runs. Loads
`workers` and `model_shards` alone. On a CPU the formula stands in for the kernels, gloo for NCCL and plain calls
for graphs, so that everything around them runs there too.
"""

import argparse
import platform
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks import gpu_model
from benchmarks.gpu_model import Ceilings, Scale
from model_shards.registry import Model
from workers.attention.flash import GatheredFlash, Varlen
from workers.attention.metadata import DeviceMetadata
from workers.attention.reference import ReferenceAttention, attend_by_formula, varlen_by_formula
from workers.attention.select import DeviceAttention, select_device_attention
from workers.config import Device, Dtype
from workers.graphs import Capturer, CudaCapturer, NoCapturer
from workers.kv_cache import KvCache
from workers.torch_groups import Kind, TorchRendezvous, join_torch_group

BUDGET_S = 360.0
GROUP_DEADLINE_S = 60.0
TOLERANCE = {"float32": 1e-4, "bfloat16": 4e-2, "float16": 2e-2}  # of results of normal numbers


class CheckFailed(Exception):
    """A part found something wrong."""


@dataclass(frozen=True)
class Target:
    """Where and how small. `until` is the time by which everything ends."""

    device: Device
    dtype: Dtype
    small: bool
    until: float

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def capturer(self) -> Capturer:
        return CudaCapturer() if self.on_gpu else NoCapturer()

    def attention(self, cache: KvCache) -> DeviceAttention:
        """What a rank would take here, or on a CPU the same with the formula for kernels."""
        if self.on_gpu:
            return select_device_attention(cache)
        return GatheredFlash(cache, Varlen(varlen_by_formula), attend_by_formula)

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()


@dataclass
class HeadShape:
    """What a cache asks of a model."""

    num_local_query_heads: int
    num_local_kv_heads: int
    head_dim: int
    num_layers: int = 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny shapes and few steps")
    parser.add_argument(
        "--budget-s", type=float, default=BUDGET_S, help="parts that would begin later are left out"
    )
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("gpu-check: torch sees no GPU here; --device cpu --small runs the same code without one")
    started = time.monotonic()
    dtype: Dtype = "bfloat16" if arguments.device == "cuda" else "float32"
    target = Target(arguments.device, dtype, arguments.small, started + arguments.budget_s)
    print(heading(target))
    failed = run_parts(target)
    print(
        f"\ngpu-check: {time.monotonic() - started:.0f} s; "
        + (f"FAILED: {', '.join(failed)}" if failed else "passed")
    )
    sys.exit(1 if failed else 0)


def run_parts(target: Target) -> list[str]:
    """The names of those that failed, or that the time did not suffice for."""
    parts: dict[str, Callable[[], None]] = {
        "attention": lambda: check_attention(target),
        "collectives": lambda: check_collectives(target),
        "model": lambda: check_and_measure_model(target),
    }
    failed = []
    for name, part in parts.items():
        print(f"\n-- {name}", flush=True)
        if time.monotonic() > target.until:
            print("left out: the time is over")
            failed.append(name)
            continue
        try:
            part()
        except CheckFailed as error:
            print(f"FAILED: {error}")
            failed.append(name)
        except Exception:  # whatever a driver, a compiler or a library raises; the other parts can still tell
            traceback.print_exc(file=sys.stdout)
            failed.append(name)
    return failed


def heading(target: Target) -> str:
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, CUDA {torch.version.cuda}"
    name = torch.cuda.get_device_name() if target.on_gpu else "CPU"
    return f"gpu-check on {name}, {target.dtype}: {versions}"


def check_attention(target: Target) -> None:
    """Decodes, whole prompts and later chunks in one step, then decodes alone, against the formula."""
    shapes = (
        [HeadShape(8, 2, 64), HeadShape(9, 3, 64)]
        if target.small
        else [HeadShape(32, 8, 128), HeadShape(9, 3, 64)]
    )
    for shape in shapes:
        for block_size in (16, 256):
            for window in (None, 100):
                worst = max(
                    attention_difference(target, shape, block_size, window, with_prompts)
                    for with_prompts in (True, False)
                )
                heads = f"{shape.num_local_query_heads}/{shape.num_local_kv_heads} heads of {shape.head_dim}"
                print(f"{heads}, blocks of {block_size}, window {window}: greatest difference {worst:.1e}")
                if not worst < TOLERANCE[target.dtype]:
                    raise CheckFailed(f"attention differs by {worst:.3g} from the formula")


def attention_difference(
    target: Target, shape: HeadShape, block_size: int, window: int | None, with_prompts: bool
) -> float:
    contexts = [70, 33, 17, 1] if target.small else [700, 256, 255, 17, 1]
    counts = [1] * len(contexts)
    if with_prompts:
        contexts += [60, 40] if target.small else [300, 64, 513]
        counts += [60, 9] if target.small else [300, 20, 100]
    width = -(-max(contexts) // block_size)
    generator = torch.Generator(target.torch_device).manual_seed(0)
    cache = KvCache(
        shape,
        num_blocks=len(contexts) * width,
        block_size=block_size,
        dtype=target.dtype,
        device=target.device,
    )
    cache.layers[0].normal_(generator=generator)
    step = step_over(cache, contexts, counts, width)
    query_heads, kv_heads = shape.num_local_query_heads, shape.num_local_kv_heads
    heads, value = (
        torch.randn(
            (sum(counts), number, shape.head_dim),
            dtype=cache.dtype,
            device=target.torch_device,
            generator=generator,
        )
        for number in (query_heads + kv_heads, kv_heads)
    )
    expected = ReferenceAttention(cache).prepare(step).attend(0, heads, value, None, window)
    found = target.attention(cache).prepare(step).attend(0, heads, value, None, window)
    return (found.float() - expected.float()).abs().max().item()


def step_over(cache: KvCache, contexts: Sequence[int], counts: Sequence[int], width: int) -> DeviceMetadata:
    """Sequence i owns the blocks i, i + n, i + 2n, so that they lie apart."""
    device, size, number = cache.device, cache.block_size, len(contexts)
    tables = torch.arange(number)[:, None] + torch.arange(width) * number
    slots = [
        int(tables[row, place // size]) * size + place % size
        for row, (context, count) in enumerate(zip(contexts, counts, strict=True))
        for place in range(context - count, context)
    ]
    num_decodes = counts.count(1)
    return DeviceMetadata(
        torch.tensor(slots, device=device),
        torch.tensor([0, *counts], device=device).cumsum(0).int(),
        torch.tensor(contexts, dtype=torch.int32, device=device),
        tables.int().to(device),
        num_decodes,
        longest_query=max(counts),
        longest_context=max(contexts),
        num_prompt_keys=sum(contexts[num_decodes:]),
    )


def check_collectives(target: Target) -> None:
    """NCCL with one rank: the three collectives, and one of them captured and replayed."""
    kind: Kind = "nccl" if target.on_gpu else "gloo"
    rendezvous = TorchRendezvous(kind, "127.0.0.1", 1, GROUP_DEADLINE_S)
    place = rendezvous.address.partition(":")[2]
    started = time.perf_counter()
    group = join_torch_group(
        kind, place, 0, 1, deadline_s=GROUP_DEADLINE_S, step_deadline_s=GROUP_DEADLINE_S, rendezvous=rendezvous
    )
    print(f"a group over {group.transport} in {time.perf_counter() - started:.2f} s")
    values = torch.arange(1000, dtype=torch.float32, device=target.torch_device)
    buffer = values.clone()
    replay = target.capturer().capture(lambda: group.all_reduce(buffer))
    results = {
        "all_reduce": group.all_reduce(values.clone()),
        "all_gather": group.all_gather(values)[0],
        "broadcast": group.broadcast(values.clone()),
        "captured all_reduce": replay(),
    }
    target.synchronize()
    wrong = [name for name, result in results.items() if not torch.equal(result, values)]
    group.abort()
    group.close()
    if wrong:
        raise CheckFailed(f"wrong results of {', '.join(wrong)} over {kind}")
    print(f"right: {', '.join(results)}; aborted and closed")


def check_and_measure_model(target: Target) -> None:
    """One model for all that follows: making it is what takes long."""
    scale = gpu_model.SMALL if target.small else gpu_model.LLAMA_3_8B
    scale = replace(scale, device=target.device, dtype=target.dtype)
    model = gpu_model.random_model(scale)
    print(f"{scale.name}: {gpu_model.weight_bytes(model) / 1e9:.2f} GB of random weights")
    check_graphs(target, scale, model)
    ceilings = gpu_model.measure_ceilings(target.torch_device, target.dtype, small=target.small)
    print(f"ceilings, measured: {ceilings.bytes_per_s / 1e9:.0f} GB/s, {ceilings.flops_per_s / 1e12:.2f} Tflop/s")
    measure(target, scale, model, ceilings)


def check_graphs(target: Target, scale: Scale, model: Model) -> None:
    """Hidden states of replayed steps, with padding and without, against the same steps queued one by one."""
    scale = replace(scale, max_num_seqs=8)
    graphs = gpu_model.forward_of(scale, model, target.attention, target.capturer())
    eager = gpu_model.forward_of(replace(scale, cuda_graphs=False), model, target.attention, target.capturer())
    for rows in (8, 7, 1):
        found, expected = (gpu_model.decode_hidden(scale, forward, rows) for forward in (graphs, eager))
        worst = relative_difference(found, expected)
        print(f"{rows} rows replayed: greatest difference {worst:.1e} of the largest value")
        if not worst < TOLERANCE[target.dtype]:
            raise CheckFailed(f"a replayed step of {rows} rows differs by {worst:.3g}")


def relative_difference(found: Tensor, expected: Tensor) -> float:
    difference = (found.float() - expected.float()).abs().max() / expected.float().abs().max()
    return difference.item()


def measure(target: Target, scale: Scale, model: Model, ceilings: Ceilings) -> None:
    runner = gpu_model.runner_of(scale, model)
    for batch in scale.batches:
        print(gpu_model.decode_line(gpu_model.measure_decode(scale, model, runner, batch), ceilings), flush=True)
    print(gpu_model.prefill_line(gpu_model.measure_prefill(scale, model, runner), ceilings), flush=True)
    print(gpu_model.where_time_goes(scale, runner, target.torch_device, scale.batches[-2]))
    if target.on_gpu:
        del runner
        torch.cuda.empty_cache()
        eager = gpu_model.runner_of(replace(scale, cuda_graphs=False), model)
        print(
            "without graphs: " + gpu_model.decode_line(gpu_model.measure_decode(scale, model, eager, 1), ceilings)
        )


if __name__ == "__main__":
    main()
