"""Buckets, padding and static inputs. Captures are traces here: like CUDA's they keep all that is no tensor."""

from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from model_shards.group import SingleRank
from model_shards.layers import ops
from model_shards.registry import Model
from model_shards.weights.loader import load_model
from tests.fakes.checkpoints import write_tiny_llama
from tests.workers.plans import GREEDY, worker_config
from workers.attention.flash import GatheredFlash, Varlen
from workers.attention.reference import ReferenceAttention, attend_by_formula, varlen_by_formula
from workers.batch import Batch, BatchPacker
from workers.forward import DeviceForward, device_forward, new_cache
from workers.graphs import Compute, NoCapturer, decode_buckets, pad_decodes
from workers.kv_cache import KvCache
from workers.protocol import SequenceId
from workers.sequences import LiveSequence, ScheduledSequence

BLOCK_SIZE = 4
MOST_ROWS = 5
CONFIG = worker_config(block_size=BLOCK_SIZE, max_num_seqs=MOST_ROWS, max_num_batched_tokens=64, max_model_len=32)
NUM_BLOCKS = 40


@pytest.fixture(scope="module", autouse=True)
def only_torch() -> Iterator[None]:
    """As on a GPU: a trace records torch's operations alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "kernels_for", lambda tensor: None)
        yield


class Tracer:
    """Records the operations of one run over the static buffers and repeats exactly these."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.replayed: list[int] = []

    def capture(self, compute: Compute) -> Compute:
        trace: Callable[[], Tensor] = make_fx(compute)()
        rows = len(trace())
        self.rows.append(rows)

        def replay() -> Tensor:
            self.replayed.append(rows)
            return trace()

        return replay


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    path: Path = write_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))
    return load_model(path, SingleRank(), device=torch.device("cpu"), dtype=torch.float32)


def live(number: int, num_tokens: int) -> LiveSequence:
    """Sequence n owns the blocks 7n to 7n + 6."""
    token_ids = array("q", ((number * 37 + place * 11) % 1000 for place in range(num_tokens)))
    blocks = list(range(number * 7, number * 7 + 7))
    return LiveSequence(SequenceId(number), token_ids, num_tokens, GREEDY, blocks, 0)


def forward_with(
    model: Model, capturer: Tracer | NoCapturer, *, cuda_graphs: bool = True
) -> tuple[DeviceForward, KvCache]:
    config = replace(CONFIG, cuda_graphs=cuda_graphs)
    cache = new_cache(model, config, NUM_BLOCKS + 1)
    attention = GatheredFlash(cache, Varlen(varlen_by_formula), attend_by_formula)
    return device_forward(model, config, cache, attention, capturer), cache


@pytest.fixture(scope="module")
def traced(model: Model) -> tuple[DeviceForward, Tracer]:
    """Tracing takes a second a graph. What a test leaves in the cache no later one reads."""
    tracer = Tracer()
    return forward_with(model, tracer)[0], tracer


@torch.inference_mode()
def hidden_of_steps(forward: DeviceForward, lengths: list[int], decodes: int) -> list[Tensor]:
    """A prompt each, then so many decodes of all together: the hidden states of each step."""
    packer = BatchPacker(CONFIG)
    sequences = [live(number, length + decodes) for number, length in enumerate(lengths)]
    steps = [[ScheduledSequence(each, 0, length) for each, length in zip(sequences, lengths, strict=True)]]
    for turn in range(decodes):
        steps.append(
            [ScheduledSequence(each, length + turn, 1) for each, length in zip(sequences, lengths, strict=True)]
        )
    return [forward.prepare(packer.pack(step)).run().clone() for step in steps]


@pytest.mark.parametrize("most", [1, 2, 3, 5, 8, 100, 256, 1000])
def test_buckets_grow_by_half_at_most_and_end_with_the_most(most: int) -> None:
    buckets = decode_buckets(most)
    assert buckets[0] == 1
    assert buckets[-1] == most
    assert list(buckets) == sorted(set(buckets))
    for smaller, larger in pairwise(buckets[1:]):
        assert larger <= smaller * 1.5
    assert len(decode_buckets(256)) == 16


def test_padding_reads_and_writes_a_block_that_nobody_owns() -> None:
    packer = BatchPacker(CONFIG)
    batch = packer.pack([ScheduledSequence(live(1, 6), 5, 1), ScheduledSequence(live(2, 9), 8, 1)])
    inputs, tables = pad_decodes(batch, 4, NUM_BLOCKS, BLOCK_SIZE)
    assert inputs[1:].tolist() == [
        [8, 5, 0, 0],
        [16 * BLOCK_SIZE, 8 * BLOCK_SIZE + 1, NUM_BLOCKS * BLOCK_SIZE, NUM_BLOCKS * BLOCK_SIZE],
        [9, 6, 1, 1],
    ]
    assert inputs[0, 2:].tolist() == [0, 0]
    assert tables.tolist() == [[14, 15, 16], [7, 8, 7], [NUM_BLOCKS] * 3, [NUM_BLOCKS] * 3]


def test_graphs_are_captured_from_the_largest_to_the_smallest(traced: tuple[DeviceForward, Tracer]) -> None:
    assert traced[1].rows == [5, 4, 3, 2, 1]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_replay_gives_what_the_same_step_gives_without_graphs(
    model: Model, traced: tuple[DeviceForward, Tracer], count: int
) -> None:
    lengths = [3, 9, 4, 12, 1][:count]
    forward, tracer = traced
    tracer.replayed.clear()
    replayed = hidden_of_steps(forward, lengths, decodes=6)
    queued = hidden_of_steps(forward_with(model, NoCapturer(), cuda_graphs=False)[0], lengths, decodes=6)
    for found, expected in zip(replayed, queued, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert tracer.replayed == [count] * 6


def test_padding_is_computed_beside_what_sequences_own(model: Model) -> None:
    config = replace(CONFIG, max_num_seqs=7)  # 5 sequences take the graph of 6 rows
    cache = new_cache(model, config, NUM_BLOCKS + 1)
    forward = device_forward(model, config, cache, ReferenceAttention(cache), NoCapturer())
    batch = BatchPacker(config).pack([ScheduledSequence(live(number, 1), 0, 1) for number in range(5)])
    forward.prepare(batch).run()
    for layer in cache.layers:
        written = layer.any(dim=-1).any(dim=1).any(dim=0)  # [blocks, block_size]
        assert written.nonzero().tolist() == [[0, 0], [7, 0], [14, 0], [21, 0], [28, 0], [NUM_BLOCKS, 0]]


def test_a_step_with_a_prompt_is_not_replayed(traced: tuple[DeviceForward, Tracer]) -> None:
    forward, tracer = traced
    tracer.replayed.clear()
    batch: Batch = BatchPacker(CONFIG).pack(
        [ScheduledSequence(live(0, 5), 4, 1), ScheduledSequence(live(1, 3), 0, 3)]
    )
    forward.prepare(batch).run()
    assert tracer.replayed == []
