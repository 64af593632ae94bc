"""The device's forward pass under the runner: the CPU's tokens, no wait within a step, and its largest upload."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from model_shards.group import SingleRank
from model_shards.registry import Model
from model_shards.weights.loader import load_model
from tests.fakes.checkpoints import write_tiny_llama
from tests.workers.plans import Job, PlanMaker, random_prompts, run_to_the_end, worker_config
from workers.attention.flash import GatheredFlash, PagedFlash, Varlen
from workers.attention.reference import attend_by_formula, varlen_by_formula
from workers.attention.select import DeviceAttention
from workers.config import WorkerConfig
from workers.forward import device_forward, largest_step, new_cache
from workers.graphs import NoCapturer
from workers.kv_cache import KvCache
from workers.memory_profile import largest_step as largest_pass
from workers.memory_profile import profile_memory
from workers.runner import Runner

VOCABULARY = 1003
NUM_BLOCKS = 120
WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "bincount")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    path: Path = write_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))
    return load_model(path, SingleRank(), device=torch.device("cpu"), dtype=torch.float32)


def gathered(cache: KvCache) -> DeviceAttention:
    return GatheredFlash(cache, Varlen(varlen_by_formula), attend_by_formula)


def paged(cache: KvCache) -> DeviceAttention:
    return PagedFlash(cache, Varlen(varlen_by_formula))


def device_runner(model: Model, config: WorkerConfig, form: Any = gathered) -> Runner:
    cache = new_cache(model, config, NUM_BLOCKS + 1)
    forward = device_forward(model, config, cache, form(cache), NoCapturer())
    return Runner(model, SingleRank(), config, NUM_BLOCKS, forward)


@pytest.mark.parametrize("form", [gathered, paged])
@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_generates_what_the_cpu_generates(model: Model, form: Any, cuda_graphs: bool) -> None:
    config = worker_config(block_size=8, max_num_seqs=5, max_model_len=128, cuda_graphs=cuda_graphs)
    prompts = random_prompts([1, 9, 30, 64, 17], VOCABULARY)
    jobs = {number: Job(prompt, 5 + number) for number, prompt in enumerate(prompts)}

    def tokens_of(runner: Runner) -> dict[int, list[int]]:
        chunks = iter([7, 3, 40, 1, 16] * 100)
        maker = PlanMaker.of_copies(jobs, config, NUM_BLOCKS)
        return run_to_the_end(runner, maker, chunk=lambda: next(chunks))

    expected = tokens_of(Runner(model, SingleRank(), config, NUM_BLOCKS))
    assert tokens_of(device_runner(model, config, form)) == expected


class _Refusing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fails at what would make the host wait for a GPU: reading a number, or a shape that depends on numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in WAITING, f"{func} waits for the device"
        if name in ("index", "index_put", "index_put_"):
            masks = [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
            assert not masks, f"{func} with a mask waits for the device"
        return func(*args, **(kwargs or {}))


@contextmanager
def no_waits() -> Iterator[None]:
    with _Refusing():  # type: ignore[no-untyped-call]
        yield


def test_the_guard_sees_waits() -> None:
    numbers = torch.arange(3)
    for wait in (numbers[1].item, lambda: numbers[numbers > 1], numbers.nonzero):
        with pytest.raises(AssertionError, match="waits for the device"), no_waits():
            wait()


@pytest.mark.parametrize("chunk", [100, 6], ids=["whole prompts", "chunks"])
def test_no_step_waits_for_the_device(model: Model, chunk: int) -> None:
    """Prompts and decodes, queued and replayed, up to the ids, which the sampler reads once."""
    config = worker_config(block_size=8, max_num_seqs=5, max_model_len=128)
    cache = new_cache(model, config, NUM_BLOCKS + 1)
    attention = GatheredFlash(cache, Varlen(_shapes_alone), attend_by_formula)
    forward = device_forward(model, config, cache, attention, NoCapturer())
    runner = Runner(model, SingleRank(), config, NUM_BLOCKS, forward)
    jobs = {number: Job(prompt, 4) for number, prompt in enumerate(random_prompts([1, 9, 30], VOCABULARY))}
    maker = PlanMaker(jobs, config, NUM_BLOCKS)
    with no_waits():
        run_to_the_end(runner, maker, chunk=lambda: chunk)


def _shapes_alone(query: torch.Tensor, *_: Any, window_size: Any) -> torch.Tensor:
    """In the place of a kernel: nothing on the host looks at what it computes."""
    return query.clone()


def test_the_largest_steps_fit_the_upload(model: Model) -> None:
    for seqs, tokens in ((4, 4), (3, 50)):
        config = worker_config(block_size=8, max_num_seqs=seqs, max_num_batched_tokens=tokens, max_model_len=64)
        runner = device_runner(model, config)
        jobs = {number: Job(prompt, 3) for number, prompt in enumerate(random_prompts([61] * seqs, VOCABULARY))}
        run_to_the_end(runner, PlanMaker(jobs, config, NUM_BLOCKS), chunk=lambda: tokens // seqs)  # noqa: B023
        assert largest_step(config) < 3 * (tokens + 2 * seqs) + seqs * 11 + 2


def test_the_profiled_pass_is_as_large_as_a_step_can_be(model: Model) -> None:
    config = worker_config(max_num_seqs=7, max_num_batched_tokens=40, max_model_len=32)
    assert largest_pass(model, config, torch.device("cpu")).shape == (7, VOCABULARY)
    profile = profile_memory(model, config)
    assert (profile.free > 0, profile.total, profile.activations) == (True, 0, 0)
