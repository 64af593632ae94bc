"""Paged attention on a GPU: FlashAttention as `torch.nn.attention.varlen` offers it, in one of two forms.

`PagedFlash` hands the KV blocks and their tables to the kernel. `GatheredFlash` is for a torch, or a block size,
with which the kernel does not take them: decodes read their blocks through a kernel of ours
(workers.attention.paged_decode), and the keys of prompts are gathered into one row of tokens first.

Neither waits for the device, and a step of decodes alone has shapes that follow from the number of its rows, so
that it can be captured in a graph. How sums are split is left to the kernels (FlashAttention 2 refuses
`num_splits`): with cuBLAS beside them a row's bits depend on the batch anyway.

Knows KV blocks and shapes; knows nothing of sequences' tokens, models or sampling.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from model_shards.layers.rotary import Rotation
from workers.attention.metadata import DeviceMetadata
from workers.errors import WorkerError
from workers.kv_cache import KvCache

_FLASH_2_PAGE = 256  # tokens: its pages are a multiple of this


class DecodeKernel(Protocol):
    """Attention of one new token a sequence over the blocks of one layer."""

    def __call__(
        self,
        query: Tensor,  # [rows, query heads, head_dim]
        pages: Tensor,  # [2, KV heads, blocks, block_size, head_dim], keys first
        block_tables: Tensor,  # [rows, blocks of a row] int32
        contexts: Tensor,  # [rows] int32, at least 1
        window: int | None,
        /,
    ) -> Tensor:  # [rows, query heads, head_dim]
        ...


class Varlen:
    """`varlen_attn` with the arguments that this build of torch has. All of it is causal.

    The last query of a sequence sees its last key, however many of each there are.
    """

    def __init__(self, function: Callable[..., Any], flash_version: int = 2) -> None:
        """Raises `WorkerError` for a function without windows (torch before 2.11)."""
        parameters = inspect.signature(function).parameters
        if "window_size" not in parameters:
            raise WorkerError("varlen_attn of this torch has no window_size: torch 2.11 or newer is needed")
        self._function = function
        self._flash_version = flash_version
        self._options = {"enable_gqa": True} if "enable_gqa" in parameters else {}
        self._takes_tables = {"block_table", "seqused_k"} <= parameters.keys()

    @classmethod
    def of_torch(cls) -> "Varlen":
        """What is installed, with the implementation of FlashAttention that is active in this process."""
        from torch.nn import attention
        from torch.nn.attention.varlen import varlen_attn

        active = getattr(attention, "current_flash_attention_impl", lambda: None)()
        return cls(varlen_attn, 3 if active == "FA3" else 2)

    def pages_refusal(self, block_size: int) -> str | None:
        """Why blocks of `block_size` tokens cannot be read where they are; None when they can."""
        if not self._takes_tables:
            return f"varlen_attn of torch {torch.__version__} takes no block tables"
        if self._flash_version == 2 and block_size % _FLASH_2_PAGE:
            return (
                f"FlashAttention 2 reads pages of a multiple of {_FLASH_2_PAGE} tokens, block_size is {block_size}"
            )
        return None

    def rows(
        self,
        query: Tensor,  # [queries, query heads, head_dim]
        key: Tensor,  # [keys, KV heads, head_dim]
        value: Tensor,  # [keys, KV heads, head_dim]
        starts: tuple[Tensor, Tensor],  # of queries and of keys, each [sequences + 1] int32
        longest: tuple[int, int],
        window: int | None,
    ) -> Tensor:  # [queries, query heads, head_dim]
        """Keys of a sequence lie in one run."""
        return self._call(query, key, value, *starts, *longest, window)

    def pages(
        self,
        query: Tensor,  # [queries, query heads, head_dim]
        pages: Tensor,  # [2, KV heads, blocks, block_size, head_dim], keys first
        metadata: DeviceMetadata,
        key_starts: Tensor,  # [sequences + 1] int32: the contexts, added up
        window: int | None,
    ) -> Tensor:  # [queries, query heads, head_dim]
        """Keys lie in blocks. FlashAttention 2 wants the summed lengths beside the table, 3 refuses them."""
        key, value = (half.permute(1, 2, 0, 3) for half in pages)
        return self._call(
            query,
            key,
            value,
            metadata.starts,
            key_starts if self._flash_version == 2 else None,
            metadata.longest_query,
            metadata.longest_context,
            window,
            block_table=metadata.block_tables,
            seqused_k=metadata.contexts,
        )

    def _call(self, *arguments: Any, **tables: Tensor) -> Tensor:
        *positional, window = arguments
        left = -1 if window is None else window - 1  # keys before a token's own
        result: Tensor = self._function(*positional, window_size=(left, 0), **self._options, **tables)
        return result


class PagedFlash:
    """A `DeviceAttention` that reads the blocks where they are."""

    def __init__(self, cache: KvCache, varlen: Varlen) -> None:
        self.cache = cache
        self.varlen = varlen

    def prepare(self, metadata: DeviceMetadata) -> "PagedStep":
        return PagedStep(self, metadata)


class PagedStep:
    """The `AttentionContext` of one step."""

    def __init__(self, attention: PagedFlash, metadata: DeviceMetadata) -> None:
        self._attention = attention
        self._metadata = metadata
        self._slots = attention.cache.token_rows(metadata.slots)
        self._key_starts = summed(metadata.contexts)

    def attend(
        self, layer: int, heads: Tensor, value: Tensor, rotation: Rotation | None, window: int | None
    ) -> Tensor:
        cache = self._attention.cache
        query, _ = cache.store(layer, self._slots, heads, value, rotation)
        return self._attention.varlen.pages(query, cache.layers[layer], self._metadata, self._key_starts, window)


class GatheredFlash:
    """A `DeviceAttention` for any block size: one kernel for decodes, another for prompts."""

    def __init__(self, cache: KvCache, varlen: Varlen, decode: DecodeKernel) -> None:
        self.cache = cache
        self.varlen = varlen
        self.decode = decode

    def prepare(self, metadata: DeviceMetadata) -> "GatheredStep":
        return GatheredStep(self, metadata)


@dataclass(frozen=True, slots=True)
class _PromptKeys:
    """Where the keys of a step's prompts are, for all layers. `slots` is None when they are this step's own."""

    slots: Tensor | None  # [keys] int64
    query_starts: Tensor  # [prompts + 1] int32, counted from the first token after the decodes
    key_starts: Tensor  # [prompts + 1] int32


class GatheredStep:
    """The `AttentionContext` of one step."""

    def __init__(self, attention: GatheredFlash, metadata: DeviceMetadata) -> None:
        self._attention = attention
        self._metadata = metadata
        self._slots = attention.cache.token_rows(metadata.slots)
        has_prompts = metadata.num_decodes < len(metadata.contexts)
        self._prompts = _find_prompt_keys(metadata, attention.cache.block_size) if has_prompts else None

    def attend(
        self, layer: int, heads: Tensor, value: Tensor, rotation: Rotation | None, window: int | None
    ) -> Tensor:
        count = self._metadata.num_decodes
        query, key = self._attention.cache.store(layer, self._slots, heads, value, rotation)
        if self._prompts is None:
            return self._decode(layer, query, window)
        prompts = self._attend_prompts(layer, self._prompts, query[count:], key[count:], value[count:], window)
        if count == 0:
            return prompts
        return torch.cat((self._decode(layer, query[:count], window), prompts))

    def _decode(self, layer: int, query: Tensor, window: int | None) -> Tensor:
        count, metadata = self._metadata.num_decodes, self._metadata
        pages = self._attention.cache.layers[layer]
        return self._attention.decode(
            query, pages, metadata.block_tables[:count], metadata.contexts[:count], window
        )

    def _attend_prompts(
        self, layer: int, prompts: _PromptKeys, query: Tensor, key: Tensor, value: Tensor, window: int | None
    ) -> Tensor:
        if prompts.slots is not None:
            key, value = self._attention.cache.tokens(layer, prompts.slots)
        longest = (self._metadata.longest_query, self._metadata.longest_context)
        return self._attention.varlen.rows(
            query, key, value, (prompts.query_starts, prompts.key_starts), longest, window
        )


def _find_prompt_keys(metadata: DeviceMetadata, block_size: int) -> _PromptKeys:
    """Worked out on the device, from what is there."""
    count = metadata.num_decodes
    query_starts = metadata.starts[count:] - count
    if metadata.fresh_prompts:
        return _PromptKeys(None, query_starts, query_starts)
    key_starts = summed(metadata.contexts[count:])
    place = torch.arange(metadata.num_prompt_keys, device=key_starts.device, dtype=torch.int32)
    prompt = torch.searchsorted(key_starts[1:], place, right=True)
    offset = place - key_starts[prompt]
    blocks = metadata.block_tables[count:][prompt, offset // block_size].long()
    return _PromptKeys(blocks * block_size + offset % block_size, query_starts, key_starts)


def summed(
    lengths: Tensor,  # [sequences] int32
) -> Tensor:  # [sequences + 1] int32
    """Where each of several runs begins, and where the last ends."""
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
