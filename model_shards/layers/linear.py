"""All matrix products of a model, behind one class: where weights are packed and where batch invariance is kept.

Measured on CPU, float32, one thread: `F.linear` gives a row the same bits in any batch of 4 rows or more and other
bits in 1, 2 or 3, and repacks the weights at each call. oneDNN's packed weights give equal bits for every row
count and are faster from 2 rows on (49,152 x 576 over two ranks: 1 row 3.7 ms against 10.1 for the 4 rows that
`F.linear` needs; 32 rows 16 against 23). They are an internal operation of torch, so a probe decides and
`F.linear` is the fall-back.

oneDNN keeps what it made for a number of rows, half a megabyte a weight shape, and part of it for ever: a rank
would grow by gigabytes with the steps of all sizes that it sees. So rows are padded to one of few counts. Knows
local shards; knows of other ranks only the sum.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model_shards.layers.placement import Placement

# Fewer rows than this and `F.linear` on CPU takes another path, with other bits. Threads share the rows out, so
# each needs as many: 5 rows on two threads are 3 and 2.
_INVARIANT_ROWS = 4
_EXACT_ROWS = 32  # more are padded to the next of eight counts between two powers of two
_PACKING_ROWS_HINT = 64  # the row count that the packed layout is made for; with 1, one row gets other bits
_PROBE_ROWS = (1, 2, 3, 7)
_PROBE_BATCH = 16
_PROBE_OUTPUTS = 4096  # of more, a probe takes fewer: it costs as much as filling the weight, in time and memory
_BLOCK_OUTPUTS = 64


class Linear(nn.Module):
    """`x @ weight.T (+ bias)` with this rank's rows of a weight. Fill the parameters, then call `prepare`."""

    weight: nn.Parameter | None  # None once packed
    bias: nn.Parameter | None

    def __init__(self, out_features: int, in_features: int, placement: Placement, *, bias: bool = False) -> None:
        super().__init__()
        self.out_features = out_features
        self.in_features = in_features
        self.weight = empty_parameter(out_features, in_features, dtype=placement.dtype)
        self.bias = empty_parameter(out_features, dtype=placement.dtype) if bias else None
        self._keep_rows = placement.batch_invariant and placement.device.type == "cpu"
        self._packed: Tensor | None = None

    def prepare(self) -> None:
        """Pack the weight where that is faster. The plain copy is let go, unless another layer shares it."""
        weight = self.weight
        if weight is None or weight.device.type != "cpu" or weight.dtype != torch.float32:
            return
        if packing_works(self.out_features, self.in_features):
            self._packed = pack_weight(weight.detach())
            self.weight = None

    @property
    def packed_weight(self) -> Tensor | None:
        """In oneDNN's layout; None where it is plain."""
        return self._packed

    def dense_weight(self) -> Tensor:  # [out_features, in_features]
        """The weight as it is multiplied with, unpacked where it is packed."""
        if self._packed is not None:
            return self._packed.to_dense()
        assert self.weight is not None, "a layer has its weight plain or packed"
        return self.weight.detach()

    def forward(
        self,
        rows: Tensor,  # [rows, in_features]
    ) -> Tensor:  # [rows, out_features]
        count = rows.shape[0]
        padding = self._padded_count(count) - count
        if padding:
            rows = F.pad(rows, (0, 0, 0, padding))
        if self._packed is not None:
            product = _multiply_packed(rows, self._packed, self.bias)
        else:
            assert self.weight is not None, "a layer has its weight plain or packed"
            product = F.linear(rows, self.weight, self.bias)
        return product[:count] if padding else product

    def _padded_count(self, count: int) -> int:
        if self._packed is not None:
            return few_counts(count)
        if self._keep_rows:
            multiple = _INVARIANT_ROWS * torch.get_num_threads()
            return -(-few_counts(count) // multiple) * multiple
        return count


class RowParallelLinear(nn.Module):
    """A linear layer whose input columns are cut over the ranks: local product, all-reduce, then the bias once."""

    bias: nn.Parameter | None

    def __init__(
        self, out_features: int, local_in_features: int, placement: Placement, *, bias: bool = False
    ) -> None:
        super().__init__()
        self.shard = Linear(out_features, local_in_features, placement)
        self.bias = empty_parameter(out_features, dtype=placement.dtype) if bias else None
        self._group = placement.group

    def forward(
        self,
        rows: Tensor,  # [rows, local in_features]
    ) -> Tensor:  # [rows, out_features], equal on every rank
        total = self._group.all_reduce(self.shard(rows))
        return total if self.bias is None else total + self.bias


def few_counts(count: int) -> int:
    """The least number of rows from `count` on that products are made of: at most an eighth more."""
    if count <= _EXACT_ROWS:
        return count
    unit = 1 << ((count - 1).bit_length() - 4)
    return -(-count // unit) * unit


def empty_parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """A parameter without memory, which the loader replaces: whatever is still like this was not filled."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)


@cache
def packing_works(out_features: int, in_features: int) -> bool:
    """Whether this build of torch packs float32 weights of that shape and multiplies them batch-invariantly."""
    if out_features > _PROBE_OUTPUTS:  # in blocks that know nothing of each other; the last may be narrower
        return packing_works(_PROBE_OUTPUTS - _BLOCK_OUTPUTS + out_features % _BLOCK_OUTPUTS, in_features)
    weight = torch.outer(torch.linspace(0.5, 1.0, out_features), torch.linspace(-1.0, 1.0, in_features))
    rows = torch.linspace(-2.0, 2.0, _PROBE_BATCH * in_features).view(_PROBE_BATCH, in_features)
    try:
        packed = pack_weight(weight)
        whole = _multiply_packed(rows, packed, None)
        parts_agree = all(torch.equal(_multiply_packed(rows[:n], packed, None), whole[:n]) for n in _PROBE_ROWS)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False  # not in this build
    expected = F.linear(rows, weight)
    return parts_agree and torch.allclose(whole, expected, rtol=1e-4, atol=1e-5 * in_features)


def pack_weight(weight: Tensor) -> Tensor:
    """In oneDNN's own layout, which an internal operation of torch makes."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKING_ROWS_HINT)
    return packed


def _multiply_packed(rows: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")
    return product
