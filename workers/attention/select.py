"""Which attention implementation a rank uses, and the two seams between it and the forward pass.

Knows devices, dtypes and implementations; knows nothing of batches.
"""

import importlib.util
import logging
from typing import Protocol

import torch

from model_shards.cpu_kernels.kernels import CpuKernels
from model_shards.model import AttentionContext, ShardedModel
from workers.attention.compiled import CompiledAttention, kernels_or_refusal
from workers.attention.flash import GatheredFlash, PagedFlash, Varlen
from workers.attention.metadata import AttentionMetadata, DeviceMetadata
from workers.attention.sdpa import PagedAttention
from workers.errors import WorkerError
from workers.kv_cache import KvCache

_log = logging.getLogger(__name__)

_FLASH_DTYPES = (torch.bfloat16, torch.float16)
_LEAST_CAPABILITY = (8, 0)  # of FlashAttention 2, and of bfloat16
_HEAD_DIM_UNIT, _LARGEST_HEAD_DIM = 8, 256


class Attention(Protocol):
    """Makes the attention context of a step that a CPU plans."""

    def prepare(self, metadata: AttentionMetadata) -> AttentionContext:
        """Everything that is the same for all layers is worked out here, once. Valid for one forward pass."""
        ...


class DeviceAttention(Protocol):
    """The same from what is on an accelerator already. Waits for nothing, so it can be captured in a graph."""

    def prepare(self, metadata: DeviceMetadata) -> AttentionContext: ...


def select_attention(model: ShardedModel, cache: KvCache) -> Attention:
    """The implementation for a cache in a CPU's memory; the choice is logged with its reason. Raises `WorkerError`
    for any other.
    """
    if cache.device.type != "cpu":
        raise WorkerError(f"there is no attention for device {cache.device.type!r} on a CPU")
    kernels = kernels_or_refusal(cache)
    if isinstance(kernels, CpuKernels):
        _log.info("attention: compiled kernels over KV blocks of %d tokens", cache.block_size)
        return CompiledAttention(cache, kernels)
    _log.info("attention: torch's flash attention for CPUs over gathered KV blocks: %s", kernels)
    return PagedAttention(cache, model.num_local_query_heads)


def select_device_attention(cache: KvCache, varlen: Varlen | None = None) -> DeviceAttention:
    """The implementation for a cache on a GPU; the choice is logged with its reason. Raises `WorkerError`."""
    _check_flash(cache)
    varlen = Varlen.of_torch() if varlen is None else varlen
    refusal = varlen.pages_refusal(cache.block_size)
    if refusal is None:
        _log.info("attention: FlashAttention over KV blocks of %d tokens", cache.block_size)
        return PagedFlash(cache, varlen)
    if importlib.util.find_spec("triton") is None:
        raise WorkerError(f"no attention: {refusal}, and triton, for a kernel that reads such blocks, is missing")
    from workers.attention.paged_decode import PagedDecode

    _log.info("attention: FlashAttention for prompts, a Triton kernel over KV blocks for decodes: %s", refusal)
    return GatheredFlash(cache, varlen, PagedDecode(_multiprocessors(cache.device)))


def _check_flash(cache: KvCache) -> None:
    if cache.dtype not in _FLASH_DTYPES:
        raise WorkerError(f"FlashAttention computes in bfloat16 or float16, not {cache.dtype}")
    if cache.head_dim % _HEAD_DIM_UNIT or cache.head_dim > _LARGEST_HEAD_DIM:
        raise WorkerError(
            f"FlashAttention takes heads of a multiple of {_HEAD_DIM_UNIT} up to {_LARGEST_HEAD_DIM}, "
            f"the model's have {cache.head_dim}"
        )
    if cache.device.type == "cuda" and torch.cuda.get_device_capability(cache.device) < _LEAST_CAPABILITY:
        found = torch.cuda.get_device_capability(cache.device)
        raise WorkerError(
            f"{torch.cuda.get_device_name(cache.device)} has compute capability {found[0]}.{found[1]}; "
            f"FlashAttention needs {_LEAST_CAPABILITY[0]}.{_LEAST_CAPABILITY[1]} or newer"
        )


def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1
