"""One row has the same bits in any batch, packed or not, and the sum over ranks is the whole product."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from model_shards.group import SingleRank
from model_shards.layers import linear
from model_shards.layers.linear import Linear, RowParallelLinear
from model_shards.layers.placement import Placement
from tests.fakes.thread_group import ThreadGroup, run_ranks

CPU = torch.device("cpu")
ALONE = Placement(SingleRank(), CPU, torch.float32)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def filled(layer: nn.Module, **values: Tensor) -> None:
    for name, value in values.items():
        layer.register_parameter(name, nn.Parameter(value, requires_grad=False))


def ready(weight: Tensor, bias: Tensor | None = None, placement: Placement = ALONE) -> Linear:
    out_features, in_features = weight.shape
    layer = Linear(out_features, in_features, placement, bias=bias is not None)
    filled(layer, weight=weight, **({} if bias is None else {"bias": bias}))
    layer.prepare()
    return layer


@pytest.fixture(params=["packed", "plain"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "plain":
        monkeypatch.setattr(linear, "packing_works", lambda out_features, in_features: False)
    elif not linear.packing_works(96, 96):
        pytest.skip("this build of torch does not pack")
    return str(request.param)


@pytest.mark.parametrize(("out_features", "in_features"), [(960, 576), (576, 67), (1, 3), (1003, 96)])
def test_a_row_has_the_same_bits_in_any_batch(path: str, out_features: int, in_features: int) -> None:
    layer = ready(drawn(out_features, in_features), drawn(out_features, seed=1))
    rows = drawn(150, in_features, seed=2)
    whole = layer(rows)
    for start, stop in [(0, 1), (7, 8), (3, 5), (10, 13), (20, 24), (0, 33), (50, 150), (149, 150)]:
        assert torch.equal(layer(rows[start:stop]), whole[start:stop])


@pytest.mark.parametrize("num_threads", [2, 3])
@pytest.mark.parametrize("num_rows", [4, 5, 6, 7, 9, 10, 13])
def test_a_row_has_the_same_bits_when_threads_share_the_rows(
    path: str, num_rows: int, num_threads: int, intra_op_threads: Callable[[int], None]
) -> None:
    intra_op_threads(num_threads)
    layer = ready(drawn(320, 96))
    rows = drawn(150, 96, seed=2)
    assert torch.equal(layer(rows[:num_rows]), layer(rows)[:num_rows])


def test_the_product_is_right(path: str) -> None:
    weight, bias, rows = drawn(70, 96), drawn(70, seed=1), drawn(5, 96, seed=2)
    layer = ready(weight, bias)
    assert (layer.weight is None) == (path == "packed")
    expected = rows.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(layer(rows).double(), expected, rtol=0, atol=1e-5)


def test_no_rows_give_no_rows(path: str) -> None:
    assert ready(drawn(8, 6))(drawn(0, 6)).shape == (0, 8)


def test_the_dense_weight_can_be_had_back(path: str) -> None:
    weight = drawn(70, 96)
    assert torch.equal(ready(weight).dense_weight(), weight)


def test_preparing_twice_changes_nothing(path: str) -> None:
    layer = ready(drawn(70, 96))
    before = layer(drawn(3, 96))
    layer.prepare()
    assert torch.equal(layer(drawn(3, 96)), before)


def test_other_dtypes_are_not_packed() -> None:
    placement = Placement(SingleRank(), CPU, torch.bfloat16)
    layer = ready(drawn(64, 64).to(torch.bfloat16), placement=placement)
    assert layer.weight is not None


def test_products_are_made_of_few_numbers_of_rows(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN keeps memory for each that it has seen."""
    made: set[int] = set()
    multiply, plain = linear._multiply_packed, torch.nn.functional.linear

    def multiply_packed(rows: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
        made.add(len(rows))
        return multiply(rows, packed, bias)

    def multiply_plain(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        made.add(len(rows))
        return plain(rows, weight, bias)

    weight, rows = drawn(8, 4), drawn(512, 4, seed=1)
    layer = ready(weight)
    monkeypatch.setattr(linear, "_multiply_packed", multiply_packed)
    monkeypatch.setattr(torch.nn.functional, "linear", multiply_plain)
    for count in range(1, 513):
        assert layer(rows[:count]).shape == (count, 8)
        assert count <= max(made) < 1.125 * count + 4 * torch.get_num_threads()
    assert len(made) <= 64
    torch.testing.assert_close(layer(rows[:401]), rows[:401] @ weight.T, rtol=1e-4, atol=1e-5)


def test_rows_are_not_padded_where_batch_invariance_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "packing_works", lambda out_features, in_features: False)
    weight, rows = drawn(960, 576), drawn(1, 576, seed=1)
    fast = ready(weight, placement=Placement(SingleRank(), CPU, torch.float32, batch_invariant=False))
    assert torch.equal(fast(rows), torch.nn.functional.linear(rows, weight))


def test_a_build_without_the_operation_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(weight: Tensor) -> Tensor:
        raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute '_reorder_linear_weight'")

    monkeypatch.setattr(linear, "pack_weight", absent)
    assert not linear.packing_works.__wrapped__(40, 40)


def test_a_build_that_multiplies_otherwise_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "pack_weight", lambda weight: weight)
    monkeypatch.setattr(linear, "_multiply_packed", lambda rows, packed, bias: rows @ packed.T + len(rows))
    assert not linear.packing_works.__wrapped__(40, 40)
    monkeypatch.setattr(linear, "_multiply_packed", lambda rows, packed, bias: 1.1 * rows @ packed.T)
    assert not linear.packing_works.__wrapped__(40, 40)


@pytest.mark.parametrize("with_bias", [False, True])
def test_row_parallel_ranks_sum_and_add_the_bias_once(path: str, with_bias: bool) -> None:
    weight, bias, rows = drawn(32, 50), drawn(32, seed=1), drawn(6, 50, seed=2)
    cuts = [slice(0, 30), slice(30, 35), slice(35, 50)]

    def work(group: ThreadGroup) -> Tensor:
        cut = cuts[group.rank]
        layer = RowParallelLinear(32, cut.stop - cut.start, Placement(group, CPU, torch.float32), bias=with_bias)
        filled(layer.shard, weight=weight[:, cut].contiguous())
        if with_bias:
            filled(layer, bias=bias)
        layer.shard.prepare()
        output: Tensor = layer(rows[:, cut])
        return output

    outputs = run_ranks(3, work)
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    expected = rows @ weight.T + (bias if with_bias else 0)
    torch.testing.assert_close(outputs[0], expected, rtol=0, atol=1e-5)


def test_a_probe_of_many_outputs_takes_fewer_and_keeps_the_last_block(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[tuple[int, ...]] = []
    pack = linear.pack_weight

    def noting(weight: Tensor) -> Tensor:
        packed.append(tuple(weight.shape))
        return pack(weight)

    monkeypatch.setattr(linear, "pack_weight", noting)
    works = linear.packing_works.__wrapped__
    monkeypatch.setattr(linear, "packing_works", works)
    assert [works(outputs, 24) for outputs in (4096, 49152, 100_003)] == [works(40, 24)] * 3
    assert packed == [(4096, 24), (4032, 24), (4032 + 100_003 % 64, 24), (40, 24)]
