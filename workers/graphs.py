"""Decode steps captured as graphs, one for each of a few numbers of rows, so that a step costs one launch.

A step takes the smallest graph that holds it; the rows that are left over are padding: they compute token 0 at
position 0 and write to a block that no sequence owns. Graphs are captured from the largest to the smallest, so
the smaller ones find their memory in what the largest took.

Knows batches, buckets and static buffers; what a graph is on a device is the capturer's business.
"""

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from model_shards.model import ShardedModel
from workers.attention.metadata import DeviceMetadata
from workers.attention.select import DeviceAttention
from workers.batch import Batch
from workers.kv_cache import KvCache

_log = logging.getLogger(__name__)

_WARM_UPS = 2  # kernels are compiled and libraries set up outside of a capture
_INPUTS = 4  # for each row: token, position, slot, context

Compute = Callable[[], Tensor]
IntRows = npt.NDArray[np.int64]


class Capturer(Protocol):
    """Turns a computation over static buffers into one that is cheaper to repeat."""

    def capture(self, compute: Compute) -> Compute:
        """Calling the result repeats `compute` on what its inputs hold then; it overwrites what it gave before."""
        ...


class CudaCapturer:
    """CUDA graphs that share one memory pool. Collectives over NCCL are captured with the rest."""

    def __init__(self) -> None:
        self._stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._pool: Any = None

    def capture(self, compute: Compute) -> Compute:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                compute()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog asks for events on a thread of its own meanwhile, which the default mode forbids.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            result = compute()
        self._pool = graph.pool()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


class NoCapturer:
    """For devices without graphs: the computation itself, over the same buffers and padding."""

    def capture(self, compute: Compute) -> Compute:
        return compute


def decode_buckets(most: int) -> tuple[int, ...]:
    """Row counts to capture, ascending up to `most`; from 2 on each is at most half as large again as the last."""
    sizes = {most}
    size = 1
    while size < most:
        sizes |= {size, size * 3 // 2} if size > 1 else {size}
        size *= 2
    return tuple(sorted(each for each in sizes if each <= most))


def pad_decodes(batch: Batch, rows: int, padding_block: int, block_size: int) -> tuple[IntRows, IntRows]:
    """A batch of decodes as the inputs [4, rows] and the block tables [rows, blocks] of a graph."""
    count = len(batch.scheduled)
    inputs = np.empty((_INPUTS, rows), dtype=np.int64)
    inputs[:, count:] = [[0], [0], [padding_block * block_size], [1]]
    inputs[0, :count] = batch.token_ids.numpy()
    inputs[1, :count] = batch.positions.numpy()
    inputs[2, :count] = batch.attention.slots.numpy()
    inputs[3, :count] = [query.context for query in batch.attention.queries]
    tables = np.full((rows, batch.attention.block_tables.shape[1]), padding_block, dtype=np.int64)
    tables[:count] = batch.attention.block_tables
    return inputs, tables


class DecodeGraphs:
    """The forward passes of decode steps. Owns their static inputs; used by one thread."""

    def __init__(
        self,
        model: ShardedModel,
        attention: DeviceAttention,
        cache: KvCache,
        *,
        most_rows: int,
        most_blocks: int,  # of a sequence
        padding_block: int,  # one of the cache's that no sequence is given
        capturer: Capturer,
    ) -> None:
        """A collective: every rank captures the same graphs in the same order."""
        self.buckets = decode_buckets(most_rows)
        self.padding_block = padding_block
        self._model = model
        self._attention = attention
        self._block_size = cache.block_size
        device = cache.device
        self._inputs = torch.zeros((_INPUTS, most_rows), dtype=torch.int64, device=device)
        self._inputs[2] = padding_block * cache.block_size
        self._inputs[3] = 1
        self._tables = torch.full((most_rows, most_blocks), padding_block, dtype=torch.int32, device=device)
        self._starts = torch.arange(most_rows + 1, dtype=torch.int32, device=device)
        self._replays = self._capture(capturer)

    def bucket_for(self, batch: Batch) -> int | None:
        """The graph that holds the batch; None when it is not of decodes alone, or is too large."""
        count = len(batch.scheduled)
        if batch.attention.num_decodes < count:
            return None
        return next((bucket for bucket in self.buckets if bucket >= count), None)

    def pad(self, batch: Batch, bucket: int) -> tuple[IntRows, IntRows]:
        return pad_decodes(batch, bucket, self.padding_block, self._block_size)

    def fill(
        self,
        inputs: Tensor,  # [4, bucket] int32, on the device
        tables: Tensor,  # [bucket, blocks] int32, on the device
    ) -> None:
        """Put a step's numbers where its graph reads them."""
        self._inputs[:, : inputs.shape[1]].copy_(inputs)
        self._tables[: tables.shape[0], : tables.shape[1]].copy_(tables)

    def replay(self, bucket: int) -> Tensor:  # [bucket, hidden]
        """The final hidden states, padding last. Valid until the next replay."""
        return self._replays[bucket]()

    @torch.inference_mode()
    def _capture(self, capturer: Capturer) -> dict[int, Compute]:
        started = time.perf_counter()
        replays = {
            bucket: capturer.capture(partial(self._compute, bucket))
            for bucket in sorted(self.buckets, reverse=True)
        }
        seconds = time.perf_counter() - started
        _log.info("decode steps are captured for %s rows, in %.1f s", ", ".join(map(str, self.buckets)), seconds)
        return replays

    def _compute(self, rows: int) -> Tensor:
        token_ids, positions, slots, contexts = self._inputs[:, :rows]
        metadata = DeviceMetadata(
            slots,
            self._starts[: rows + 1],
            contexts.int(),
            self._tables[:rows],
            num_decodes=rows,
            longest_query=1,
            longest_context=self._tables.shape[1] * self._block_size,
        )
        return self._model.forward(token_ids, positions, self._attention.prepare(metadata))
