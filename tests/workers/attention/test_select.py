"""Which attention a cache gets, and that the reason is logged or the refusal says it."""

import importlib.util
import logging

import pytest
import torch

from model_shards.cpu_kernels.load import cpu_kernels
from tests.workers.attention.steps import Shape
from workers.attention import compiled
from workers.attention.compiled import CompiledAttention
from workers.attention.flash import GatheredFlash, PagedFlash, Varlen
from workers.attention.reference import varlen_by_formula
from workers.attention.sdpa import PagedAttention
from workers.attention.select import select_attention, select_device_attention
from workers.config import Dtype
from workers.errors import WorkerError
from workers.kv_cache import KvCache


def cache_of(block_size: int, dtype: Dtype = "bfloat16", head_dim: int = 16) -> KvCache:
    return KvCache(Shape(4, 2, head_dim), num_blocks=2, block_size=block_size, dtype=dtype, device="cpu")


@pytest.mark.parametrize(
    ("dtype", "head_dim", "kind", "words"),
    [
        ("float32", 16, CompiledAttention, "compiled kernels over KV blocks of 16 tokens"),
        ("bfloat16", 16, PagedAttention, "compiled kernels compute in float32, not torch.bfloat16"),
        ("float32", 12, PagedAttention, "take heads of a multiple of 8, the model's have 12"),
    ],
)
def test_a_cache_in_the_hosts_memory_gets_an_attention_of_the_cpu(
    dtype: Dtype, head_dim: int, kind: type, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    if cpu_kernels() is None:
        pytest.skip("this machine has no C compiler")
    caplog.set_level(logging.INFO)
    shape = Shape(4, 2, head_dim)
    attention = select_attention(shape, cache_of(16, dtype, head_dim))  # type: ignore[arg-type]  # as it reads
    assert type(attention) is kind
    assert words in caplog.text


def test_without_a_compiler_torch_attends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(compiled, "cpu_kernels", lambda: None)
    attention = select_attention(Shape(4, 2, 16), cache_of(16, "float32"))  # type: ignore[arg-type]  # as it reads
    assert type(attention) is PagedAttention
    assert "there are no compiled kernels" in caplog.text


def test_blocks_that_the_kernel_takes_are_read_in_place(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert isinstance(select_device_attention(cache_of(256), Varlen(varlen_by_formula)), PagedFlash)
    assert "FlashAttention over KV blocks of 256 tokens" in caplog.text


def test_other_blocks_have_a_kernel_of_their_own_for_decodes(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("triton", reason="the kernel is Triton's")
    caplog.set_level(logging.INFO)
    assert isinstance(select_device_attention(cache_of(16), Varlen(varlen_by_formula)), GatheredFlash)
    assert "a Triton kernel over KV blocks for decodes: FlashAttention 2 reads pages of a multiple" in caplog.text


def test_without_triton_the_refusal_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else find(name))
    with pytest.raises(WorkerError, match=r"block_size is 16, and triton, .* is missing"):
        select_device_attention(cache_of(16), Varlen(varlen_by_formula))


@pytest.mark.parametrize(
    ("dtype", "head_dim", "words"),
    [
        ("float32", 16, "computes in bfloat16 or float16, not torch.float32"),
        ("bfloat16", 12, "multiple of 8 up to 256, the model's have 12"),
        ("float16", 264, "multiple of 8 up to 256, the model's have 264"),
    ],
)
def test_what_flash_attention_cannot_compute_is_refused(dtype: Dtype, head_dim: int, words: str) -> None:
    with pytest.raises(WorkerError, match=words):
        select_device_attention(cache_of(256, dtype, head_dim), Varlen(varlen_by_formula))


def test_an_old_gpu_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_of(256)
    monkeypatch.setattr(KvCache, "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    with pytest.raises(WorkerError, match=r"Tesla T4 has compute capability 7\.5; FlashAttention needs 8\.0"):
        select_device_attention(cache, Varlen(varlen_by_formula))
