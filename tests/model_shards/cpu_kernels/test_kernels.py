"""What only the compiled functions promise, beyond what tests of the named ops and of attention say of all."""

import math
from collections.abc import Callable

import pytest
import torch

from model_shards.cpu_kernels.kernels import CpuKernels
from model_shards.cpu_kernels.load import cpu_kernels


@pytest.fixture
def kernels() -> CpuKernels:
    found = cpu_kernels()
    if found is None:
        pytest.skip("this machine has no C compiler")
    return found


def test_silu_is_right_over_all_floats(kernels: CpuKernels) -> None:
    gate = torch.cat(
        [torch.linspace(-120, 120, 4001), torch.tensor([-math.inf, math.inf, -1e30, 1e30, 0.0, 1e-30])]
    )
    found = kernels.silu_and_multiply(torch.cat((gate, torch.ones_like(gate)))[None])[0]
    expected = torch.nn.functional.silu(gate.double())
    finite = expected.isfinite()
    torch.testing.assert_close(found[finite].double(), expected[finite], rtol=5e-7, atol=1e-30)
    assert found[gate == math.inf].item() == math.inf


@pytest.mark.parametrize("place", [0, 5, 8, 12])
def test_a_number_that_is_none_stays_none(kernels: CpuKernels, place: int) -> None:
    rows = torch.ones(2, 13)
    rows[1, place] = torch.nan
    weight = torch.ones(13)
    assert kernels.rms_norm(rows, weight, 1e-5)[1].isnan().all()
    normed, total = kernels.add_rms_norm(rows, rows, weight, 1e-5)
    assert normed[1].isnan().all()
    assert total[1].isnan().sum() == 1
    gated = kernels.silu_and_multiply(torch.cat((rows, torch.ones(2, 13)), dim=1))
    assert gated[1].isnan().nonzero().flatten().tolist() == [place]
    assert not gated[0].isnan().any()


def test_rows_that_do_not_lie_together(kernels: CpuKernels) -> None:
    wide = torch.randn(6, 4, 40)
    narrow = wide[:, 1:3, :24]
    weight = torch.randn(24)
    assert torch.equal(kernels.rms_norm(narrow, weight, 1e-5), kernels.rms_norm(narrow.clone(), weight, 1e-5))
    strided = wide[:, 0]
    assert torch.equal(kernels.silu_and_multiply(strided), kernels.silu_and_multiply(strided.clone()))
    sums = [kernels.add_rms_norm(rows, rows, torch.ones(40), 1e-5)[1] for rows in (strided, strided.clone())]
    assert torch.equal(*sums)


@pytest.mark.parametrize("num_threads", [2, 3, 5])
def test_threads_share_what_is_large(
    kernels: CpuKernels, num_threads: int, intra_op_threads: Callable[[int], None]
) -> None:
    """Each row by one of them, to the same bits."""
    gate_up, weight = torch.randn(301, 2 * 419), torch.randn(838)
    heads, value, cache = gate_up.view(301, -1, 2), gate_up[:, :2].view(301, 1, 2), torch.zeros(2000, 2)
    angles = (torch.randn(301, 1, 2), torch.randn(301, 1, 2))
    places = (torch.arange(301), torch.arange(301) + 1000)

    def all_of_them() -> list[torch.Tensor]:
        return [
            kernels.silu_and_multiply(gate_up),
            kernels.rms_norm(gate_up, weight, 1e-5),
            *kernels.add_rms_norm(gate_up, gate_up, weight, 1e-5),
            kernels.rotate_and_store(heads, value, angles, cache, places),
            cache.clone(),
        ]

    alone = all_of_them()
    intra_op_threads(num_threads)
    cache.zero_()
    for shared, expected in zip(all_of_them(), alone, strict=True):
        assert torch.equal(shared, expected)
