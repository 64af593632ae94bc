"""The elementwise arithmetic between the GEMMs, one named function each, so that a fused kernel can replace one.

Invariant: every function computes a row (token) from that row alone and with the same bits in any batch and on any
number of intra-op threads. Knows tensors; knows nothing of parameters, ranks or models.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(
    hidden: Tensor,  # [..., size]
    weight: Tensor,  # [size]
    epsilon: float,
) -> Tensor:  # [..., size]
    return F.rms_norm(hidden, (weight.shape[0],), weight, epsilon)


def add_rms_norm(
    update: Tensor,  # [tokens, hidden], what a sub-layer adds
    residual: Tensor,  # [tokens, hidden]
    weight: Tensor,  # [hidden]
    epsilon: float,
) -> tuple[Tensor, Tensor]:  # both [tokens, hidden]
    """The normed sum, and the sum itself, which is the next residual."""
    residual = residual + update
    return rms_norm(residual, weight, epsilon), residual


def layer_norm(
    hidden: Tensor,  # [..., size]
    weight: Tensor,  # [size]
    bias: Tensor,  # [size]
    epsilon: float,
) -> Tensor:  # [..., size]
    return F.layer_norm(hidden, (weight.shape[0],), weight, bias, epsilon)


def rotate(
    heads: Tensor,  # [tokens, heads, head_dim]
    cosine: Tensor,  # [tokens, 1, head_dim / 2]
    sine: Tensor,  # [tokens, 1, head_dim / 2]
) -> Tensor:  # [tokens, heads, head_dim], contiguous
    """Rotary embedding: turns the pair (i, i + head_dim / 2) of each head by its token's angle."""
    half = heads.shape[-1] // 2
    first, second = heads[..., :half], heads[..., half:]
    rotated = torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
    torch.mul(first, cosine, out=rotated[..., :half]).addcmul_(second, sine, value=-1)
    torch.mul(second, cosine, out=rotated[..., half:]).addcmul_(first, sine)
    return rotated


def silu_and_multiply(
    gate_up: Tensor,  # [tokens, 2 * columns], gate first
) -> Tensor:  # [tokens, columns]
    """On a CPU by the formula: torch's own kernel computes the last elements of each thread's part with other
    code, and where a part ends depends on the number of tokens and of threads.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    if gate_up.device.type != "cpu":
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
