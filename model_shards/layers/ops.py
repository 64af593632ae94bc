"""The elementwise arithmetic between the GEMMs, one named function each, so that a fused kernel can replace one.

Invariant: every function computes a row (token) from that row alone and, on a given number of intra-op threads,
with the same bits in any batch. Float32 on a CPU goes to compiled kernels where this machine has them. Knows
tensors; knows nothing of parameters, ranks or models.
"""

import math
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from model_shards.cpu_kernels.load import kernels_for
from model_shards.layers.rotary import Rotation

_LOOP_BYTES = 128  # of a vectorised loop of torch: two vectors of the widest kind


def rms_norm(
    hidden: Tensor,  # [..., size]
    weight: Tensor,  # [size]
    epsilon: float,
) -> Tensor:  # [..., size]
    kernels = kernels_for(hidden)
    if kernels is not None:
        return kernels.rms_norm(hidden, weight, epsilon)
    return F.rms_norm(hidden, (weight.shape[0],), weight, epsilon)


def add_rms_norm(
    update: Tensor,  # [tokens, hidden], what a sub-layer adds
    residual: Tensor,  # [tokens, hidden]
    weight: Tensor,  # [hidden]
    epsilon: float,
) -> tuple[Tensor, Tensor]:  # both [tokens, hidden]
    """The normed sum, and the sum itself, which is the next residual."""
    kernels = kernels_for(residual)
    if kernels is not None:
        return kernels.add_rms_norm(update, residual, weight, epsilon)
    residual = residual + update
    return rms_norm(residual, weight, epsilon), residual


def layer_norm(
    hidden: Tensor,  # [..., size]
    weight: Tensor,  # [size]
    bias: Tensor,  # [size]
    epsilon: float,
) -> Tensor:  # [..., size]
    return F.layer_norm(hidden, (weight.shape[0],), weight, bias, epsilon)


def add_layer_norm(
    update: Tensor,  # [tokens, hidden], what a sub-layer adds
    residual: Tensor,  # [tokens, hidden]
    weight: Tensor,  # [hidden]
    bias: Tensor,  # [hidden]
    epsilon: float,
) -> tuple[Tensor, Tensor]:  # both [tokens, hidden]
    """The normed sum, and the sum itself, which is the next residual."""
    residual = residual + update
    return layer_norm(residual, weight, bias, epsilon), residual


def rotate(
    heads: Tensor,  # [tokens, heads, head_dim]
    rotation: Rotation,
) -> Tensor:  # [tokens, heads, head_dim], contiguous
    """Rotary embedding: turns the pair (i, i + head_dim / 2) of each head by its token's angle."""
    partners = heads.roll(heads.shape[-1] // 2, -1)
    return partners.mul_(rotation.sine).addcmul_(heads, rotation.cosine)


def rotate_and_store(
    heads: Tensor,  # [tokens, query heads + KV heads, head_dim], those of the queries first
    value: Tensor,  # [tokens, KV heads, head_dim]
    rotation: Rotation | None,  # None where positions are in the embedding
    cache: Tensor,  # [places, head_dim] of one layer
    places: tuple[Tensor, Tensor],  # of keys and of values, each [tokens * KV heads] int64
) -> tuple[Tensor, Tensor]:  # queries and keys, rotated
    """Keys and values go to their places in the cache; both are also what the caller may go on with."""
    kernels = kernels_for(cache)
    if kernels is not None:
        angles = None if rotation is None else (rotation.cosine, rotation.sine)
        rotated = kernels.rotate_and_store(heads, value, angles, cache, places)
        return rotated[:, : -value.shape[1]], rotated[:, -value.shape[1] :]
    if rotation is not None:
        heads = rotate(heads, rotation)
    query, key = heads.tensor_split((-value.shape[1],), dim=1)
    head_dim = cache.shape[1]
    cache.index_copy_(0, places[0], key.reshape(-1, head_dim))
    cache.index_copy_(0, places[1], value.reshape(-1, head_dim))
    return query, key


def silu_and_multiply(
    gate_up: Tensor,  # [tokens, 2 * columns], gate first
) -> Tensor:  # [tokens, columns]
    """On a CPU by the formula where torch's own kernel would compute some elements with other code.

    Those are the last of each thread's part, unless every part is a number of whole vectors.
    """
    kernels = kernels_for(gate_up)
    if kernels is not None:
        return kernels.silu_and_multiply(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    if gate_up.device.type != "cpu" or _parts_are_whole(gate.shape[-1] * gate.itemsize):
        return F.silu(gate).mul_(up)
    wide = gate.float()
    divisor = wide.neg().exp_().add_(1.0)
    return torch.div(wide, divisor, out=divisor).to(gate_up.dtype).mul_(up)


def gelu_tanh(
    columns: Tensor,  # [tokens, columns]
) -> Tensor:  # [tokens, columns]
    """GPT-2's GELU, by the formula: torch's own kernel gives the last elements of a tensor other bits on a CPU."""
    if columns.device.type != "cpu":
        return F.gelu(columns, approximate="tanh")
    wide = columns.float()
    inner = wide * wide * wide * 0.044715
    inner = inner.add_(wide).mul_(math.sqrt(2 / math.pi)).tanh_()
    return inner.add_(1.0).mul_(wide).mul_(0.5).to(columns.dtype)


def _parts_are_whole(row_bytes: int) -> bool:
    """Whether a kernel's loop over rows of that size ends with whole vectors in each thread's part."""
    return all(row_bytes % (_LOOP_BYTES * parts) == 0 for parts in range(1, torch.get_num_threads() + 1))


@cache
def _constant(value: float) -> Tensor:
    return torch.tensor(value)
