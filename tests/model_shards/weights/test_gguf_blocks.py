"""Quantised blocks decode to the very bits that the `gguf` package gives."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from model_shards.weights.gguf_blocks import decode_blocks
from model_shards.weights.gguf_header import BLOCK_TYPES


@pytest.mark.parametrize("code", BLOCK_TYPES)
def test_blocks_decode_as_the_gguf_package_does(code: int) -> None:
    name, elements, block_bytes = BLOCK_TYPES[code]
    kind = GGMLQuantizationType(code)
    assert (kind.name, *gguf.GGML_QUANT_SIZES[kind]) == (name, elements, block_bytes)
    # Any bytes are blocks. Without the exponents of infinity, so that every number equals itself.
    raw = np.random.default_rng(0).integers(0, 255, (7, 12 * block_bytes), dtype=np.uint8)
    raw[(raw & 0x7C) == 0x7C] ^= 0x40
    expected = torch.from_numpy(quants.dequantize(raw, kind))
    decoded = decode_blocks(torch.from_numpy(raw), name, block_bytes)
    assert decoded.shape == (7, 12 * elements)
    assert torch.equal(decoded.float(), expected)


def test_a_range_of_blocks_decodes_alone() -> None:
    raw = torch.randint(0, 255, (5, 6 * 20), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    whole = decode_blocks(raw, "Q4_1", 20)
    part = decode_blocks(raw[1:4, 20:80], "Q4_1", 20)
    torch.testing.assert_close(part, whole[1:4, 32:128], rtol=0, atol=0, equal_nan=True)
