"""The forward pass of a packed step, in the way that suits the device.

On a CPU straight from the batch. On an accelerator from one upload: replayed from a graph when the step is of
decodes alone, queued operation by operation otherwise. Knows batches, models and attention; knows nothing of
sampling, plans or collectives.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
from torch import Tensor

from model_shards.model import ShardedModel
from workers.attention.metadata import DeviceMetadata
from workers.attention.select import Attention, DeviceAttention, select_attention, select_device_attention
from workers.batch import Batch
from workers.config import WorkerConfig
from workers.graphs import Capturer, CudaCapturer, DecodeGraphs
from workers.kv_cache import KvCache
from workers.staging import Upload

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PreparedPass:
    """One step, ready to run. `sampled_rows` are those of the batch, where the model is."""

    run: Callable[[], Tensor]  # -> [tokens, hidden], valid until the next pass
    sampled_rows: Tensor  # [sampling sequences], integers


class ForwardPass(Protocol):
    """Owns a rank's KV memory."""

    def prepare(self, batch: Batch) -> PreparedPass:
        """What does not need the model, so that it can be timed apart. Valid until the next is prepared."""
        ...


class HostForward:
    """From the packed batch as it is."""

    def __init__(self, model: ShardedModel, attention: Attention) -> None:
        self._model = model
        self._attention = attention

    def prepare(self, batch: Batch) -> PreparedPass:
        attention = self._attention.prepare(batch.attention)
        return PreparedPass(
            partial(self._model.forward, batch.token_ids, batch.positions, attention), batch.sampled_rows
        )


class DeviceForward:
    """From one upload a step, without waiting for the device."""

    def __init__(
        self, model: ShardedModel, attention: DeviceAttention, upload: Upload, graphs: DecodeGraphs | None
    ) -> None:
        self._model = model
        self._attention = attention
        self._upload = upload
        self._graphs = graphs

    def prepare(self, batch: Batch) -> PreparedPass:
        graphs = self._graphs
        bucket = None if graphs is None else graphs.bucket_for(batch)
        if graphs is None or bucket is None:
            return self._prepare_eager(batch)
        inputs, tables, sampled_rows = self._upload.send([*graphs.pad(batch, bucket), batch.sampled_rows.numpy()])
        graphs.fill(inputs, tables)
        count = len(batch.scheduled)
        return PreparedPass(lambda: graphs.replay(bucket)[:count], sampled_rows)

    def _prepare_eager(self, batch: Batch) -> PreparedPass:
        about = batch.attention
        queries = about.queries
        per_token = np.stack([part.numpy() for part in (batch.token_ids, batch.positions, about.slots)])
        starts = np.array([*(query.first for query in queries), len(batch.token_ids)])
        contexts = np.array([query.context for query in queries])
        tokens, starts_there, contexts_there, tables, sampled_rows = self._upload.send(
            [per_token, starts, contexts, about.block_tables, batch.sampled_rows.numpy()]
        )
        token_ids, positions, slots = tokens.long()
        prompts = queries[about.num_decodes :]
        metadata = DeviceMetadata(
            slots,
            starts_there,
            contexts_there,
            tables,
            num_decodes=about.num_decodes,
            longest_query=max(query.count for query in queries),
            longest_context=max(query.context for query in queries),
            num_prompt_keys=sum(query.context for query in prompts),
            fresh_prompts=all(query.count == query.context for query in prompts),
        )
        attention = self._attention.prepare(metadata)
        return PreparedPass(partial(self._model.forward, token_ids, positions, attention), sampled_rows)


def make_forward(model: ShardedModel, config: WorkerConfig, num_blocks: int) -> ForwardPass:
    """With KV memory for `num_blocks`. A collective. Raises `OutOfMemory`, or `WorkerError` without attention."""
    if config.device == "cpu":
        return HostForward(model, select_attention(model, new_cache(model, config, num_blocks)))
    cache = new_cache(model, config, num_blocks + 1)  # one more for the padding of graphs
    return device_forward(model, config, cache, select_device_attention(cache), CudaCapturer())


def device_forward(
    model: ShardedModel, config: WorkerConfig, cache: KvCache, attention: DeviceAttention, capturer: Capturer
) -> DeviceForward:
    """Over a cache whose last block is no sequence's. A collective."""
    most_blocks = -(-config.max_model_len // config.block_size)
    upload = Upload(cache.device, largest_step(config), config.step_deadline_s)
    if not config.cuda_graphs or not model.has_static_shapes:
        why = "they are turned off" if not config.cuda_graphs else "the model's shapes follow from its tokens"
        _log.info("decode steps are not captured as graphs: %s", why)
        return DeviceForward(model, attention, upload, None)
    graphs = DecodeGraphs(
        model,
        attention,
        cache,
        most_rows=config.max_num_seqs,
        most_blocks=most_blocks,
        padding_block=cache.num_blocks - 1,
        capturer=capturer,
    )
    return DeviceForward(model, attention, upload, graphs)


def new_cache(model: ShardedModel, config: WorkerConfig, num_blocks: int) -> KvCache:
    """Raises `OutOfMemory` when the blocks do not fit."""
    return KvCache(
        model, num_blocks=num_blocks, block_size=config.block_size, dtype=config.dtype, device=config.device
    )


def largest_step(config: WorkerConfig) -> int:
    """The most integers that a step sends: three a token; two, a sampled row and a block table a sequence."""
    tokens = max(config.max_num_batched_tokens, 2 * config.max_num_seqs)  # for a graph, a row has four
    blocks = -(-config.max_model_len // config.block_size)
    return 3 * tokens + config.max_num_seqs * (3 + blocks) + 1
