"""Each elementwise part is right, and computes a row from that row alone."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from model_shards.cpu_kernels.load import cpu_kernels
from model_shards.layers import ops
from model_shards.layers.rotary import RotaryTable, Rotation


@pytest.fixture(params=["compiled", "torch's"], autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which operations compute float32 on a CPU."""
    if request.param == "torch's":
        monkeypatch.setattr(ops, "kernels_for", lambda tensor: None)
    elif cpu_kernels() is None:
        pytest.skip("this machine has no C compiler")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rotated(fused: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """As the attention layer calls it: the leading heads of a wider row."""
    heads = fused.view(len(fused), -1, cosine.shape[-1])
    return ops.rotate(heads[:, :-1], Rotation(cosine, sine))


def add_rms_norm(update: Tensor, residual: Tensor) -> Tensor:
    return torch.cat(ops.add_rms_norm(update, residual, WEIGHT.to(update.dtype), 1e-5), dim=1)


def add_layer_norm(update: Tensor, residual: Tensor) -> Tensor:
    weight = WEIGHT.to(update.dtype)
    return torch.cat(ops.add_layer_norm(update, residual, weight, -weight, 1e-5), dim=1)


WEIGHT = drawn(96, seed=9)
HEAD_WEIGHT = drawn(6, seed=9)
CASES: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
    "rms_norm": (lambda x: ops.rms_norm(x, WEIGHT.to(x.dtype), 1e-5), [drawn(200, 96)]),
    "rms_norm of heads": (lambda x: ops.rms_norm(x[:, :3], HEAD_WEIGHT.to(x.dtype), 1e-5), [drawn(200, 4, 6)]),
    "add_rms_norm": (add_rms_norm, [drawn(200, 96), drawn(200, 96, seed=1)]),
    "rotate, 64": (rotated, [drawn(200, 5 * 64), drawn(200, 1, 64, seed=1), drawn(200, 1, 64, seed=2)]),
    "rotate, 6": (rotated, [drawn(200, 5 * 6), drawn(200, 1, 6, seed=1), drawn(200, 1, 6, seed=2)]),
    "silu_and_multiply": (ops.silu_and_multiply, [drawn(200, 2 * 672)]),
    "rms_norm, odd": (lambda x: ops.rms_norm(x, WEIGHT[:67].to(x.dtype), 1e-5), [drawn(200, 67)]),
    "layer_norm": (
        lambda x: ops.layer_norm(x, WEIGHT.to(x.dtype), -WEIGHT.to(x.dtype), 1e-5),
        [drawn(200, 96)],
    ),
    "add_layer_norm": (add_layer_norm, [drawn(200, 96), drawn(200, 96, seed=1)]),
    "gelu_tanh": (ops.gelu_tanh, [drawn(200, 672)]),
    "gelu_tanh, odd": (ops.gelu_tanh, [drawn(200, 67)]),
    "silu_and_multiply, 80": (ops.silu_and_multiply, [drawn(200, 2 * 80)]),
    "silu_and_multiply, odd": (ops.silu_and_multiply, [drawn(200, 2 * 67)]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_a_row_has_the_same_bits_in_any_batch(name: str, dtype: torch.dtype) -> None:
    function, inputs = CASES[name]
    inputs = [tensor.to(dtype) for tensor in inputs]
    whole = function(*inputs)
    for start, stop in [(0, 1), (17, 18), (3, 5), (5, 8), (1, 14), (60, 133)]:
        assert torch.equal(function(*[tensor[start:stop] for tensor in inputs]), whole[start:stop])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("num_threads", [2, 3])
def test_a_row_has_the_same_bits_in_any_batch_on_several_threads(
    name: str, dtype: torch.dtype, num_threads: int, intra_op_threads: Callable[[int], None]
) -> None:
    """From 32,768 elements on threads share a tensor out by elements, so their parts end in the middle of rows."""
    function, inputs = CASES[name]
    copies = 2 + 100_000 // inputs[0].numel()
    inputs = [torch.cat([tensor] * copies).to(dtype) for tensor in inputs]
    intra_op_threads(num_threads)
    few = torch.cat([function(*[tensor[:200] for tensor in inputs])] * copies)
    for stop in range(len(few) - 12, len(few)):
        assert torch.equal(function(*[tensor[:stop] for tensor in inputs]), few[:stop])


def test_rms_norm() -> None:
    rows = drawn(4, 96).double()
    expected = rows / (rows.square().mean(-1, keepdim=True) + 1e-5).sqrt() * WEIGHT.double()
    torch.testing.assert_close(ops.rms_norm(rows.float(), WEIGHT, 1e-5).double(), expected, rtol=1e-5, atol=1e-6)


def test_add_rms_norm_returns_the_sum_as_the_residual() -> None:
    update, residual = drawn(4, 96), drawn(4, 96, seed=1)
    before = residual.clone()
    normed, total = ops.add_rms_norm(update, residual, WEIGHT, 1e-5)
    assert torch.equal(total, update + before)
    assert torch.equal(normed, ops.rms_norm(total, WEIGHT, 1e-5))
    assert torch.equal(residual, before)


def test_rotate_and_store() -> None:
    """Two query heads over one KV head, three tokens whose keys go to places 6, 0 and 3 and values one further."""
    heads, value, cache = drawn(3, 3, 8), drawn(3, 1, 8, seed=1), torch.zeros(9, 8)
    rotation = RotaryTable(8, 10, 100.0, dtype=torch.float32, device=torch.device("cpu")).at(torch.arange(4, 7))
    places = torch.tensor([6, 0, 3])
    query, key = ops.rotate_and_store(heads, value, rotation, cache, (places, places + 1))
    rotated = ops.rotate(heads, rotation)
    assert torch.equal(torch.cat((query, key), dim=1), rotated)
    assert torch.equal(cache[places], rotated[:, 2])
    assert torch.equal(cache[places + 1], value[:, 0])
    assert not cache[[2, 5, 8]].any()
    query, key = ops.rotate_and_store(heads, value, None, cache, (places, places + 1))
    assert torch.equal(torch.cat((query, key), dim=1), heads)
    assert torch.equal(cache[places], heads[:, 2])


def test_rotation_turns_pairs_by_position() -> None:
    """A dot product of two rotated heads depends on the distance of their positions alone."""
    table = RotaryTable(8, 100, 10_000.0, dtype=torch.float32, device=torch.device("cpu"))
    query, key = drawn(1, 1, 8), drawn(1, 1, 8, seed=1)

    def score(query_position: int, key_position: int) -> float:
        at = [table.at(torch.tensor([position])) for position in (query_position, key_position)]
        left, right = (ops.rotate(head, turn) for head, turn in zip((query, key), at, strict=True))
        return float((left * right).sum())

    assert score(7, 4) == pytest.approx(score(90, 87), abs=1e-4)
    assert score(7, 4) != pytest.approx(score(7, 5), abs=1e-2)
    assert score(0, 0) == pytest.approx(float((query * key).sum()), abs=1e-6)


def test_silu_and_multiply() -> None:
    gate_up = drawn(3, 10)
    gate, up = gate_up[:, :5].double(), gate_up[:, 5:].double()
    expected = gate / (1 + (-gate).exp()) * up
    torch.testing.assert_close(ops.silu_and_multiply(gate_up).double(), expected, rtol=1e-5, atol=1e-6)


def test_layer_norm() -> None:
    rows = drawn(4, 96).double()
    centred = rows - rows.mean(-1, keepdim=True)
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * WEIGHT.double() + 0.5
    found = ops.layer_norm(rows.float(), WEIGHT, torch.full((96,), 0.5), 1e-5)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


def test_add_layer_norm_returns_the_sum_as_the_residual() -> None:
    update, residual = drawn(4, 96), drawn(4, 96, seed=1)
    before = residual.clone()
    normed, total = ops.add_layer_norm(update, residual, WEIGHT, -WEIGHT, 1e-5)
    assert torch.equal(total, update + before)
    assert torch.equal(normed, ops.layer_norm(total, WEIGHT, -WEIGHT, 1e-5))
    assert torch.equal(residual, before)


def test_gelu_tanh() -> None:
    rows = drawn(3, 67) * 3
    before = rows.clone()
    expected = torch.nn.functional.gelu(rows.double(), approximate="tanh")
    torch.testing.assert_close(ops.gelu_tanh(rows).double(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(rows, before)
