"""Whether compiled functions compute what torch does: no compiler of whatever age is taken on trust."""

import torch
import torch.nn.functional as F
from torch import Tensor

from model_shards.cpu_kernels.kernels import CpuKernels, PagedQueries

_TOKENS, _QUERY_HEADS, _KV_HEADS, _HEAD_DIM = 37, 6, 2, 40
_BLOCK_SIZE, _WINDOW = 4, 9


def wrong_function(kernels: CpuKernels) -> str | None:
    """The name of a function that gives something else than it should; None when all are right."""
    results = {
        "rms_norm": _norms(kernels),
        "silu_and_multiply": _gates(kernels),
        "rotate_and_store": _rotations(kernels),
        "attend": _attention(kernels, None),
        "attend with a window": _attention(kernels, _WINDOW),
    }
    for name, (found, expected) in results.items():
        if not torch.allclose(found, expected, rtol=1e-4, atol=1e-5):
            return name
    return None


def _drawn(*shape: int) -> Tensor:
    """Numbers between -2 and 2 that look random: torch's own source of them is the user's."""
    count = torch.arange(1, 1 + int(torch.tensor(shape).prod()), dtype=torch.float64)
    return ((count * 0.6180339887498949).frac() * 4 - 2).float().view(shape)


def _norms(kernels: CpuKernels) -> tuple[Tensor, Tensor]:
    update, residual, weight = _drawn(3, 43), _drawn(43, 3).t().contiguous(), _drawn(43)
    expected = F.rms_norm(update + residual, (43,), weight, 1e-5)
    normed, total = kernels.add_rms_norm(update, residual, weight, 1e-5)
    return torch.stack((normed, kernels.rms_norm(total, weight, 1e-5))), torch.stack((expected, expected))


def _gates(kernels: CpuKernels) -> tuple[Tensor, Tensor]:
    gate_up = _drawn(3, 2 * 43) * 10
    gate, up = gate_up.chunk(2, dim=-1)
    return kernels.silu_and_multiply(gate_up), F.silu(gate) * up


def _rotations(kernels: CpuKernels) -> tuple[Tensor, Tensor]:
    heads, value = _drawn(_TOKENS, 3, _HEAD_DIM), _drawn(_TOKENS, 1, _HEAD_DIM)
    cosine, sine = _drawn(_TOKENS, 1, _HEAD_DIM), _drawn(_HEAD_DIM, 1, _TOKENS).permute(2, 1, 0).contiguous()
    cache, places = torch.zeros(2 * _TOKENS, _HEAD_DIM), torch.arange(_TOKENS)
    rotated = kernels.rotate_and_store(heads, value, (cosine, sine), cache, (places, places + _TOKENS))
    expected = heads * cosine + heads.roll(_HEAD_DIM // 2, -1) * sine
    stored = torch.cat((expected[:, 2], value[:, 0]))
    return torch.cat((rotated.flatten(), cache.flatten())), torch.cat((expected.flatten(), stored.flatten()))


def _attention(kernels: CpuKernels, window: int | None) -> tuple[Tensor, Tensor]:
    """The last tokens of one sequence, whose blocks lie in reverse order."""
    count, num_blocks = _TOKENS - 5, -(-_TOKENS // _BLOCK_SIZE)
    query = _drawn(count, _QUERY_HEADS, _HEAD_DIM)
    keys, values = _drawn(2, _KV_HEADS, num_blocks * _BLOCK_SIZE, _HEAD_DIM)
    blocks = torch.stack((keys, values)).view(2, _KV_HEADS, num_blocks, _BLOCK_SIZE, _HEAD_DIM)
    cache = blocks.flip(2).contiguous()
    tables = torch.arange(num_blocks - 1, -1, -1)[None].contiguous()
    queries = PagedQueries(torch.tensor([[0, count, _TOKENS]]), tables, count * _TOKENS)
    found = kernels.attend(query, cache, queries, window)
    distance = torch.arange(_TOKENS - count, _TOKENS)[:, None] - torch.arange(_TOKENS)
    seen = (distance >= 0) & (distance < (window or _TOKENS))
    group = _QUERY_HEADS // _KV_HEADS
    full_keys, full_values = (part[:, :_TOKENS].repeat_interleave(group, dim=0) for part in (keys, values))
    scores = (query.transpose(0, 1) @ full_keys.transpose(1, 2)) * _HEAD_DIM**-0.5
    expected = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1) @ full_values
    return found, expected.transpose(0, 1)
