"""kernels.c as functions of tensors: float32, in a CPU's memory.

Knows pointers and strides, and torch's number of threads; knows nothing of models or of what a sequence is.
"""

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_float, c_int64, c_void_p
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

HEAD_DIM_UNIT = 8  # of what `attend` takes
_SHARED_ELEMENTS = 2**16  # from so many on, threads share the work: waking one costs some 30 us
_SHARED_SCORES = 2**14  # likewise, of query rows times keys


@dataclass(frozen=True, slots=True)
class PagedQueries:
    """Which tokens of a step belong to which sequence, and where its keys are; the same for all layers."""

    rows: Tensor  # [sequences, 3] int64: first token, number of tokens, context
    tables: Tensor  # [sequences, blocks] int64
    num_scores: int  # tokens times keys, about


class _Attention(ctypes.Structure):
    _fields_ = (
        ("out", c_void_p),
        ("query", c_void_p),
        ("query_stride", c_int64),
        ("cache", c_void_p),
        ("places", c_int64),
        ("block_size", c_int64),
        ("num_query_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("dim", c_int64),
        ("window", c_int64),
        ("scale", c_float),
    )


class CpuKernels:
    """The functions of a compiled library. Invariant: a token's results have the same bits in any batch."""

    def __init__(self, library: Path) -> None:
        """Raises OSError when it cannot be loaded and AttributeError when it has other functions."""
        loaded = ctypes.CDLL(str(library))
        pointer, whole = c_void_p, c_int64
        parts = [whole, whole]
        self._rms_norm = _function(loaded.rms_norm, [*[pointer] * 3, whole, whole, c_float, *parts])
        self._add_rms_norm = _function(loaded.add_rms_norm, [*[pointer] * 5, whole, whole, c_float, *parts])
        self._silu_and_multiply = _function(loaded.silu_and_multiply, [*[pointer] * 2, whole, whole, *parts])
        self._rotate_and_store = _function(
            loaded.rotate_and_store,
            [pointer, pointer, whole, pointer, whole, *[pointer] * 5, *[whole] * 4, *parts],
        )
        self._attend = _function(loaded.attend, [*[pointer] * 3, whole, whole, *parts])

    def rms_norm(
        self,
        rows: Tensor,  # [..., size]
        weight: Tensor,  # [size]
        epsilon: float,
    ) -> Tensor:  # [..., size]
        rows = rows.contiguous()
        out = torch.empty_like(rows)
        size = weight.shape[0]
        arguments = (out.data_ptr(), rows.data_ptr(), weight.data_ptr(), rows.numel() // size, size, epsilon)
        self._share(rows.numel(), _SHARED_ELEMENTS, self._rms_norm, arguments)
        return out

    def add_rms_norm(
        self,
        update: Tensor,  # [rows, size]
        residual: Tensor,  # [rows, size]
        weight: Tensor,  # [size]
        epsilon: float,
    ) -> tuple[Tensor, Tensor]:  # the normed sum, and the sum
        update, residual = update.contiguous(), residual.contiguous()
        out, total = torch.empty_like(update), torch.empty_like(update)
        pointers = (out.data_ptr(), total.data_ptr(), update.data_ptr(), residual.data_ptr(), weight.data_ptr())
        rows, size = update.shape
        self._share(rows * size, _SHARED_ELEMENTS, self._add_rms_norm, (*pointers, rows, size, epsilon))
        return out, total

    def silu_and_multiply(
        self,
        gate_up: Tensor,  # [rows, 2 * columns]
    ) -> Tensor:  # [rows, columns]
        gate_up = gate_up.contiguous()
        rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((rows, columns))
        arguments = (out.data_ptr(), gate_up.data_ptr(), rows, columns)
        self._share(rows * columns, _SHARED_ELEMENTS, self._silu_and_multiply, arguments)
        return out

    def rotate_and_store(
        self,
        heads: Tensor,  # [tokens, query heads + KV heads, head_dim], of a token together
        value: Tensor,  # [tokens, KV heads, head_dim], of a token together
        angles: tuple[Tensor, Tensor] | None,  # cosine and sine, each tokens * head_dim
        cache: Tensor,  # [places, head_dim]
        places: tuple[Tensor, Tensor],  # of keys and of values, each [tokens * KV heads] int64
    ) -> Tensor:  # [tokens, query heads + KV heads, head_dim]
        heads, value = _dense_tokens(heads), _dense_tokens(value)
        rotated = torch.empty(heads.shape)
        tokens, num_heads, head_dim = heads.shape
        arguments = (
            rotated.data_ptr(),
            heads.data_ptr(),
            heads.stride(0),
            value.data_ptr(),
            value.stride(0),
            *((None, None) if angles is None else (angle.data_ptr() for angle in angles)),
            cache.data_ptr(),
            *(place.data_ptr() for place in places),
            *(tokens, num_heads, value.shape[1], head_dim),
        )
        self._share(rotated.numel(), _SHARED_ELEMENTS, self._rotate_and_store, arguments)
        return rotated

    def attend(
        self,
        query: Tensor,  # [tokens, query heads, head_dim], of a token together
        cache: Tensor,  # [2, KV heads, blocks, block_size, head_dim] of one layer
        queries: PagedQueries,
        window: int | None,
    ) -> Tensor:  # [tokens, query heads, head_dim]
        """Each token over its sequence up to itself, or the last `window` tokens of that.

        Online softmax over tiles of keys counted from the first token, as in FlashAttention (Dao et al., 2022).
        """
        query = _dense_tokens(query)
        _, num_kv_heads, num_blocks, block_size, head_dim = cache.shape
        out = torch.empty(query.shape)
        about = _Attention(
            out.data_ptr(),
            query.data_ptr(),
            query.stride(0),
            cache.data_ptr(),
            num_blocks * block_size,
            block_size,
            query.shape[1],
            num_kv_heads,
            head_dim,
            window or 0,
            head_dim**-0.5,
        )
        tables = queries.tables
        pointers = (ctypes.byref(about), queries.rows.data_ptr(), tables.data_ptr())
        arguments = (*pointers, tables.shape[1], len(tables))
        self._share(queries.num_scores * query.shape[1], _SHARED_SCORES, self._attend, arguments)
        return out

    def _share(self, size: int, least: int, function: Callable[..., None], arguments: tuple[object, ...]) -> None:
        """Call `function` on as many threads as torch uses; on this one alone when there is little to do."""
        parts = torch.get_num_threads() if size >= least else 1
        others = [self._pool.submit(function, *arguments, part, parts) for part in range(1, parts)]
        function(*arguments, 0, parts)
        for other in others:
            other.result()

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(max(1, (os.cpu_count() or 1) - 1), "cpu-kernels")


def _function(function: Callable[..., None], arguments: list[type]) -> Callable[..., None]:
    function.argtypes = arguments  # type: ignore[attr-defined]  # of ctypes
    function.restype = None  # type: ignore[attr-defined]
    return function


def _dense_tokens(tokens: Tensor) -> Tensor:
    """[tokens, heads, head_dim] whose heads lie one after the other, though tokens may lie apart."""
    return tokens if tokens.stride()[1:] == (tokens.shape[2], 1) else tokens.contiguous()
