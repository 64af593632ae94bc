"""How much memory the largest step takes beside weights and KV cache, measured by running one before there is any.

Knows the model, the limits of a step and a GPU's memory; knows nothing of how the answer is shared out.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from model_shards.layers import ops
from model_shards.layers.rotary import Rotation
from model_shards.model import ShardedModel
from workers.config import WorkerConfig
from workers.device import free_memory
from workers.staging import Readback


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """Bytes, after loading. On a CPU only the first is looked at, and the others are 0."""

    free: int
    total: int = 0  # of the GPU
    activations: int = 0


class _NoKeys:
    """An `AttentionContext` without keys: its results have the right shape, that is all."""

    def attend(
        self, layer: int, heads: Tensor, value: Tensor, rotation: Rotation | None, window: int | None
    ) -> Tensor:
        rotated = heads if rotation is None else ops.rotate(heads, rotation)
        return rotated[:, : -value.shape[1]].contiguous()


def profile_memory(model: ShardedModel, config: WorkerConfig) -> MemoryProfile:
    """A collective on GPUs: every rank of the group calls it at once."""
    if config.device == "cpu":
        return MemoryProfile(free_memory("cpu"))
    device = torch.device("cuda")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logits = largest_step(model, config, device)
    Readback(device, config.start_deadline_s).fetch(logits[:1, :1])
    activations = torch.cuda.max_memory_allocated() - before
    del logits
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return MemoryProfile(free, total, activations)


@torch.inference_mode()
def largest_step(model: ShardedModel, config: WorkerConfig, device: torch.device) -> Tensor:
    """Logits of as many rows as a step may sample, from as many tokens as it may have."""
    count = config.max_num_batched_tokens
    tokens = torch.zeros(count, dtype=torch.int64, device=device)
    positions = torch.arange(count, device=device) % config.max_model_len
    hidden = model.forward(tokens, positions, _NoKeys())
    return model.local_logits(hidden[: config.max_num_seqs])
