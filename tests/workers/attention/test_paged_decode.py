"""The Triton kernel for decodes: under Triton's interpreter against the formula, and compiled for GPUs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from workers.attention.reference import attend_by_formula

pytest.importorskip("triton", reason="the kernel is Triton's")
from workers.attention.paged_decode import PagedDecode, num_parts

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

CONTEXTS = (1, 16, 17, 64, 65, 130)


def inputs(heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype) -> Inputs:
    """Query, pages, tables and contexts. Blocks are shuffled, and what no row owns is not a number."""
    generator = torch.Generator().manual_seed(0)
    width = -(-max(CONTEXTS) // block_size)
    num_blocks = len(CONTEXTS) * width + 1
    pages = torch.randn(2, kv_heads, num_blocks, block_size, head_dim, generator=generator)
    pages[:, :, -1] = torch.nan
    order = torch.randperm(num_blocks - 1, generator=generator).view(len(CONTEXTS), width)
    tables = torch.full((len(CONTEXTS), width + 2), num_blocks - 1, dtype=torch.int32)
    for row, context in enumerate(CONTEXTS):
        used = -(-context // block_size)
        tables[row, :used] = order[row, :used]
        if context % block_size:
            pages[:, :, tables[row, used - 1], context % block_size :] = torch.nan
    whole = torch.randn(len(CONTEXTS), heads + 2 * kv_heads, head_dim, generator=generator)
    query = whole[:, :heads]  # a part of a wider tensor, as the model hands it over
    return query.to(dtype), pages.to(dtype), tables, torch.tensor(CONTEXTS, dtype=torch.int32)


def expected_of(
    query: torch.Tensor, pages: torch.Tensor, tables: torch.Tensor, contexts: torch.Tensor, window: int | None
) -> torch.Tensor:
    return attend_by_formula(query.float(), pages.float().nan_to_num(), tables, contexts, window)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"),
    [(9, 3, 64, 16), (4, 4, 16, 8), (8, 1, 80, 24), (16, 2, 128, 256), (3, 1, 8, 16)],
)
@pytest.mark.parametrize("multiprocessors", [1, 40], ids=["one part", "many parts"])
def test_equals_the_formula(
    heads: int, kv_heads: int, head_dim: int, block_size: int, multiprocessors: int
) -> None:
    given = inputs(heads, kv_heads, head_dim, block_size, torch.float32)
    found = PagedDecode(multiprocessors)(*given, None)
    torch.testing.assert_close(found, expected_of(*given, None), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [1, 16, 50, 64, 129, 1000])
@pytest.mark.parametrize("multiprocessors", [1, 40], ids=["one part", "many parts"])
def test_a_window_hides_the_keys_before_it(window: int, multiprocessors: int) -> None:
    given = inputs(6, 2, 32, 16, torch.float32)
    found = PagedDecode(multiprocessors)(*given, window)
    torch.testing.assert_close(found, expected_of(*given, window), rtol=1e-4, atol=1e-5)


def test_half_precision_keeps_its_type() -> None:
    given = inputs(8, 2, 64, 16, torch.float16)  # the interpreter cannot multiply bfloat16
    found = PagedDecode(40)(*given, None)
    assert found.dtype == torch.float16
    torch.testing.assert_close(found.float(), expected_of(*given, None), rtol=2e-2, atol=2e-2)


def test_keys_are_cut_only_as_far_as_programs_are_missing() -> None:
    assert num_parts(programs=8, longest_context=8192, wanted=264) == 16
    assert num_parts(programs=64, longest_context=8192, wanted=264) == 4
    assert num_parts(programs=2048, longest_context=8192, wanted=264) == 1
    assert num_parts(programs=8, longest_context=100, wanted=264) == 2  # no more parts than tiles of keys


def test_the_kernels_compile_for_gpus(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.workers.attention.compiled_decode"],
        cwd=Path(__file__).resolve().parents[3],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
