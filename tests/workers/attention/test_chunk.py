"""Attention over one chunk, fused or by products: right, the same bits in any call, and chosen by a probe."""

import pytest
import torch
from torch import Tensor

from tests.workers.attention.steps import Shape
from tests.workers.attention.test_on_a_cpu import attend_in_random_chunks, make_gathered, make_streams
from workers.attention import chunk
from workers.attention.chunk import ChunkKernel, by_products, chunk_kernel, fused, fused_works

NUM_KEYS = 256
KERNELS = [
    by_products,
    pytest.param(fused, marks=pytest.mark.skipif(not fused_works(3, NUM_KEYS, 16), reason="none")),
]


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def inputs(num_rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Two sequences with three heads; row r sees the first r + 1 keys."""
    hidden = torch.arange(NUM_KEYS) > torch.arange(num_rows).unsqueeze(1)
    mask = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
    return (
        drawn(2, 3, num_rows, 16, seed=0),
        drawn(2, 3, NUM_KEYS, 16, seed=1),
        drawn(2, 3, NUM_KEYS, 16, seed=2),
        mask[None, None],
    )


@pytest.mark.parametrize("kernel", KERNELS)
def test_result_and_weight_are_right(kernel: ChunkKernel) -> None:
    query, keys, values, mask = inputs(40)
    scores = query.double() @ keys.double().transpose(-1, -2) * 0.25 + mask
    result, weight = kernel(query, keys, values, mask, 0.25)
    torch.testing.assert_close(result.double(), scores.softmax(-1) @ values.double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(weight.double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_row_has_the_same_bits_in_any_call(kernel: ChunkKernel, num_threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        query, keys, values, mask = inputs(200)
        whole = kernel(query, keys, values, mask, 0.25)
        for start, stop in [(0, 4), (3, 7), (8, 16), (21, 61), (100, 200)]:
            rows = slice(start, stop)
            part = kernel(query[1:, 1:, rows], keys[1:, 1:], values[1:, 1:], mask[:, :, rows], 0.25)
            for found, expected in zip(part, whole, strict=True):
                assert torch.equal(found, expected[1:, 1:, rows])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("offset", [1, 4, 7])
@pytest.mark.parametrize("kernel", KERNELS)
def test_where_the_inputs_lie_in_memory_does_not_show(kernel: ChunkKernel, offset: int) -> None:
    def moved(tensor: Tensor) -> Tensor:
        """The same values, `offset` floats behind a border of 64 bytes."""
        place = torch.empty(tensor.numel() + offset)[offset:].view(tensor.shape)
        assert place.data_ptr() % 64 == 4 * offset
        return place.copy_(tensor)

    query, keys, values, mask = inputs(40)
    expected = kernel(query, keys, values, mask, 0.25)
    found = kernel(moved(query), moved(keys), moved(values), moved(mask), 0.25)
    assert all(torch.equal(left, right) for left, right in zip(found, expected, strict=True))


@pytest.fixture
def no_fused_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build of torch that knows the fused kernel by another signature, or not at all."""

    def missing(*_: object) -> tuple[Tensor, Tensor]:
        raise AttributeError("'_OpNamespace' 'aten' object has no attribute")

    monkeypatch.setattr(chunk, "fused", missing)
    monkeypatch.setattr(chunk, "fused_works", fused_works.__wrapped__)


@pytest.mark.usefixtures("no_fused_kernel")
def test_without_the_fused_kernel_products_are_taken() -> None:
    assert chunk_kernel(3, NUM_KEYS, 16) is by_products


def test_a_fused_kernel_whose_rows_depend_on_the_call_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def depends(query: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        result, weight = by_products(query, *rest)  # type: ignore[arg-type]  # the last one is the scale
        return result * (1 + 2e-7 * (query.shape[2] > 100)), weight

    monkeypatch.setattr(chunk, "fused", depends)
    assert not fused_works.__wrapped__(3, NUM_KEYS, 16)


@pytest.mark.usefixtures("no_fused_kernel")
def test_paged_attention_by_products_is_right_and_keeps_its_bits() -> None:
    shape = Shape(9, 3, head_dim=16)
    streams = make_streams(shape, 16)
    together = attend_in_random_chunks(make_gathered(shape, 200, 16), streams, None, seed=1)
    for number, stream in enumerate(streams):
        torch.testing.assert_close(together[number], stream.expected, rtol=1e-5, atol=1e-5)
        alone = attend_in_random_chunks(make_gathered(shape, 200, 16), [stream], None, seed=number)[0]
        assert torch.equal(alone, together[number])
