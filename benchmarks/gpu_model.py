"""A model of random weights and the time that its steps take, for scripts/gpu-check.

Sequences start with a context that counts as cached, so that a decode at any batch can be measured without its
prompts. Bytes and operations follow from the model's own shapes: a decode reads every weight but the embedding's
once, and the keys and values of every sequence; a prefill does two operations a weight and token, and attention's.
"""

import time
from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from model_shards.group import SingleRank
from model_shards.layers.placement import Placement
from model_shards.partition import Span
from model_shards.registry import Model, build_model
from model_shards.spec import ModelSpec
from model_shards.weights.loader import fill
from model_shards.weights.names import StoredTensor
from workers.attention.select import DeviceAttention
from workers.batch import Batch, BatchPacker
from workers.config import Device, Dtype, WorkerConfig
from workers.device import torch_dtype
from workers.forward import DeviceForward, device_forward, new_cache
from workers.graphs import Capturer
from workers.kv_cache import KvCache
from workers.protocol import KnownSequence, NewSequence, SamplingSettings, SequenceId, StepPlan, StepTimings
from workers.runner import Runner
from workers.sequences import LiveSequence, ScheduledSequence

GREEDY = SamplingSettings(temperature=0.0, top_k=0, top_p=1.0, seed=0, choice=0)
DEADLINE_S = 60.0
WARM_UPS = 3
_steps = count()


@dataclass(frozen=True, kw_only=True)
class Scale:
    """A model's shape and what is asked of it."""

    name: str
    spec: ModelSpec
    batches: tuple[int, ...]
    context: int  # tokens of a sequence when it decodes
    prompt: int  # tokens of the prefill
    steps: int  # that are timed
    max_num_seqs: int
    block_size: int = 16
    device: Device = "cuda"
    dtype: Dtype = "bfloat16"
    cuda_graphs: bool = True

    @property
    def longest_decode(self) -> int:
        """Tokens of a sequence when its steps are over."""
        return self.context + self.steps + 2 * WARM_UPS

    @property
    def max_model_len(self) -> int:
        return max(self.longest_decode, self.prompt)

    @property
    def config(self) -> WorkerConfig:
        return WorkerConfig(
            model_path="",
            tensor_parallel_size=1,
            device=self.device,
            dtype=self.dtype,
            block_size=self.block_size,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=max(self.prompt, self.max_num_seqs * self.block_size),
            cuda_graphs=self.cuda_graphs,
            step_deadline_s=DEADLINE_S,
        )

    @property
    def blocks_a_sequence(self) -> int:
        """For what it decodes here."""
        return -(-self.longest_decode // self.block_size)

    @property
    def num_blocks(self) -> int:
        return max(self.blocks_a_sequence * max(self.batches), -(-self.prompt // self.block_size))


LLAMA_3_8B = Scale(
    name="shaped like Llama 3 8B",
    spec=ModelSpec(
        architecture="llama",
        vocab_size=128256,
        hidden_size=4096,
        num_layers=32,
        num_query_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=14336,
        max_positions=8192,
        norm_epsilon=1e-5,
        rope_theta=500000.0,
        tied_embeddings=False,
    ),
    batches=(1, 32, 256),
    context=512,
    prompt=4096,
    steps=30,
    max_num_seqs=256,
)
SMALL = Scale(
    name="a tiny model",
    spec=ModelSpec(
        architecture="llama",
        vocab_size=300,
        hidden_size=64,
        num_layers=2,
        num_query_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=128,
        max_positions=256,
        norm_epsilon=1e-5,
        rope_theta=10000.0,
        tied_embeddings=False,
    ),
    batches=(1, 2, 8),
    context=40,
    prompt=64,
    steps=3,
    max_num_seqs=8,
)


class RandomCheckpoint:
    """A `Checkpoint` of small normal numbers, drawn on the device itself."""

    def __init__(self, model: Model, scale: Scale) -> None:
        self._shapes = {
            piece.tensor: piece.partition.shape
            for parameter in model.layout.values()
            for piece in parameter.pieces
        }
        self._device = torch.device(scale.device)
        self._dtype = torch_dtype(scale.dtype)
        self._generator = torch.Generator(self._device).manual_seed(0)

    def check(self, tensors: Collection[str]) -> None:
        pass

    def file_of(self, tensor: str) -> Path:
        return Path("random numbers")

    def place_of(self, tensor: str) -> StoredTensor:
        return StoredTensor(tensor)

    def shape_of(self, tensor: str) -> tuple[int, ...]:
        return self._shapes[tensor]

    def read(self, tensor: str, spans: tuple[Span, ...]) -> Tensor:
        shape = [span.size for span in spans]
        if len(shape) == 1:
            return torch.ones(shape, dtype=self._dtype, device=self._device)
        drawn = torch.randn(shape, dtype=self._dtype, device=self._device, generator=self._generator)
        return drawn.mul_(shape[-1] ** -0.5)

    def close(self) -> None:
        pass


def random_model(scale: Scale) -> Model:
    device, dtype = torch.device(scale.device), torch_dtype(scale.dtype)
    model = build_model(scale.spec, Placement(SingleRank(), device, dtype))
    fill(model, RandomCheckpoint(model, scale), rank=0, device=device, dtype=dtype)
    model.prepare()
    return model


def weight_bytes(model: Model) -> int:
    return num_weights(model) * torch_dtype_size(model)


def num_weights(model: Model, *, without_embedding: bool = False) -> int:
    sizes = {name: layout.local_size(0) for name, layout in model.layout.items()}
    return sum(size for name, size in sizes.items() if not (without_embedding and name.startswith("embedding")))


def torch_dtype_size(model: Model) -> int:
    return next(model.parameters()).dtype.itemsize


@dataclass(frozen=True)
class Ceilings:
    """What this device does at best, as measured here."""

    bytes_per_s: float  # reading and writing both counted
    flops_per_s: float  # of a square matrix product


def measure_ceilings(device: torch.device, dtype: Dtype, *, small: bool) -> Ceilings:
    numbers = 2**20 if small else 2**29
    side = 256 if small else 8192
    source = torch.ones(numbers, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    matrix = torch.randn((side, side), device=device).to(torch_dtype(dtype))
    copy_s = seconds_of(lambda: target.copy_(source), device)
    product_s = seconds_of(lambda: matrix @ matrix, device)
    return Ceilings(2 * source.nbytes / copy_s, 2 * side**3 / product_s)


def seconds_of(work: Callable[[], object], device: torch.device, times: int = 10) -> float:
    """Of one of several calls that are queued together."""
    for _ in range(WARM_UPS):
        work()
    synchronize(device)
    started = time.perf_counter()
    for _ in range(times):
        work()
    synchronize(device)
    return (time.perf_counter() - started) / times


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def runner_of(scale: Scale, model: Model) -> Runner:
    """As a rank makes it."""
    return Runner(model, SingleRank(), scale.config, scale.num_blocks)


def forward_of(
    scale: Scale, model: Model, attention: Callable[[KvCache], DeviceAttention], capturer: Capturer
) -> DeviceForward:
    """The device's forward pass alone, over a cache of its own."""
    cache = new_cache(model, scale.config, scale.max_num_seqs * 2 + 1)
    return device_forward(model, scale.config, cache, attention(cache), capturer)


@torch.inference_mode()
def decode_hidden(scale: Scale, forward: DeviceForward, rows: int) -> Tensor:  # [rows, hidden]
    """Prompts of different lengths, then one decode step of all of them: its hidden states."""
    packer = BatchPacker(scale.config)
    sequences = [
        LiveSequence(SequenceId(row), array("q", range(1, 4 + row)), 3 + row, GREEDY, [2 * row, 2 * row + 1], 0)
        for row in range(rows)
    ]
    for batch in (
        packed(packer, [ScheduledSequence(each, 0, len(each.token_ids) - 1) for each in sequences]),
        packed(packer, [ScheduledSequence(each, len(each.token_ids) - 1, 1) for each in sequences]),
    ):
        hidden = forward.prepare(batch()).run().clone()
    return hidden


def packed(packer: BatchPacker, scheduled: Sequence[ScheduledSequence]) -> Callable[[], Batch]:
    """Packed when it is its turn: a packer's buffers hold one batch."""
    return lambda: packer.pack(scheduled)


@dataclass(frozen=True)
class Measured:
    """One kind of step."""

    tokens: int
    seconds: float  # of the median step
    bytes_read: float
    flops: float
    timings: StepTimings


def measure_decode(scale: Scale, model: Model, runner: Runner, batch: int) -> Measured:
    ids = [SequenceId(number) for number in range(batch)]
    begin(scale, runner, ids)
    timed = [decode_step(runner, ids) for _ in range(scale.steps)]
    end(runner, ids)
    timed.sort(key=lambda pair: pair[0])
    seconds, timings = timed[len(timed) // 2]
    spec, size = scale.spec, torch_dtype_size(model)
    keys = batch * scale.context * 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim
    weights = num_weights(model, without_embedding=True)
    flops = 2 * batch * (weights + 2 * scale.context * spec.num_layers * spec.num_query_heads * spec.head_dim)
    return Measured(batch, seconds, (weights + keys) * size, flops, timings)


def begin(scale: Scale, runner: Runner, ids: Sequence[SequenceId]) -> None:
    """Sequences that decode from now on. What counts as cached is whatever the memory holds."""
    per = scale.blocks_a_sequence
    new = [
        NewSequence(
            number,
            tuple(range(scale.context)) if scale.context < scale.spec.vocab_size else (0,) * scale.context,
            scale.context,
            GREEDY,
            tuple(range(number * per, (number + 1) * per)),
            scale.context - 1,
            1,
        )
        for number in ids
    ]
    runner.execute(StepPlan(0, next(_steps), new=tuple(new)))
    for _ in range(WARM_UPS):
        decode_step(runner, ids)


def decode_step(runner: Runner, ids: Sequence[SequenceId]) -> tuple[float, StepTimings]:
    plan = StepPlan(0, next(_steps), known=tuple(KnownSequence(number, 1) for number in ids))
    started = time.perf_counter()
    timings = runner.execute(plan).timings
    return time.perf_counter() - started, timings


def end(runner: Runner, ids: Sequence[SequenceId]) -> None:
    runner.execute(StepPlan(0, next(_steps), ended=tuple(ids)))


def measure_prefill(scale: Scale, model: Model, runner: Runner) -> Measured:
    timed = []
    blocks = tuple(range(-(-scale.prompt // scale.block_size)))
    token_ids = tuple(place % scale.spec.vocab_size for place in range(scale.prompt))
    for _ in range(WARM_UPS + 2):
        new = NewSequence(SequenceId(0), token_ids, scale.prompt, GREEDY, blocks, 0, scale.prompt)
        started = time.perf_counter()
        timings = runner.execute(StepPlan(0, next(_steps), new=(new,))).timings
        timed.append((time.perf_counter() - started, timings))
        end(runner, [SequenceId(0)])
    seconds, timings = min(timed, key=lambda pair: pair[0])
    spec = scale.spec
    weights = num_weights(model, without_embedding=True) - spec.vocab_size * spec.hidden_size  # the head: one row
    attention = scale.prompt * spec.num_layers * spec.num_query_heads * spec.head_dim  # half of it is masked
    flops = 2 * scale.prompt * (weights + attention)
    return Measured(scale.prompt, seconds, weights * torch_dtype_size(model), flops, timings)


def decode_line(measured: Measured, ceilings: Ceilings) -> str:
    share = measured.bytes_read / measured.seconds / ceilings.bytes_per_s
    return (
        f"decode of {measured.tokens:>3}: {measured.tokens / measured.seconds:>9.0f} tok/s, "
        f"{measured.seconds * 1e3:.2f} ms a step, {share:.0%} of the bandwidth; {host_parts(measured.timings)}"
    )


def prefill_line(measured: Measured, ceilings: Ceilings) -> str:
    share = measured.flops / measured.seconds / ceilings.flops_per_s
    return (
        f"prefill of {measured.tokens}: {measured.tokens / measured.seconds:.0f} tok/s, "
        f"{measured.seconds * 1e3:.1f} ms, {share:.0%} of the rate of matrix products; "
        f"{host_parts(measured.timings)}"
    )


def host_parts(timings: StepTimings) -> str:
    parts = {"prepare": timings.prepare, "forward": timings.forward, "sample": timings.sample}
    return "host: " + ", ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in parts.items())


def where_time_goes(scale: Scale, runner: Runner, device: torch.device, batch: int, most: int = 8) -> str:
    """The device's time in one decode step, by kernel; on a CPU by operation."""
    ids = [SequenceId(number) for number in range(batch)]
    begin(scale, runner, ids)
    activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiled:
        seconds, _ = decode_step(runner, ids)
    end(runner, ids)
    spent = sorted(
        ((kernel_ms(event, device), event.key, event.count) for event in profiled.key_averages()), reverse=True
    )
    total = sum(each for each, _, _ in spent)
    lines = [f"one step of {batch}: {seconds * 1e3:.2f} ms under the profiler, {total:.2f} ms in kernels:"]
    lines += [
        f"  {each:8.3f} ms {each / total:5.0%}  {number:>5} x {name[:80]}" for each, name, number in spent[:most]
    ]
    return "\n".join(lines)


def kernel_ms(event: object, device: torch.device) -> float:
    name = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    return float(getattr(event, name)) / 1e3
