"""A kernel that replaces one function of `model_shards.layers.ops` replaces it for all families and attentions."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from model_shards.cpu_kernels.load import cpu_kernels
from model_shards.group import SingleRank
from model_shards.layers import ops
from model_shards.layers.rotary import Rotation
from tests.fakes.checkpoints import write_tiny_model
from tests.workers.attention.steps import LAYER, Shape, Stream, attend, make_cache
from tests.workers.plans import GREEDY, worker_config
from tests.workers.test_runner import load
from workers.attention.compiled import CompiledAttention
from workers.attention.flash import GatheredFlash, PagedFlash, Varlen
from workers.attention.metadata import AttentionMetadata, QueryRange
from workers.attention.reference import ReferenceAttention, attend_by_formula, varlen_by_formula
from workers.attention.sdpa import PagedAttention
from workers.kv_cache import KvCache
from workers.protocol import KnownSequence, NewSequence, SequenceId, StepPlan
from workers.runner import Runner

NUM_LAYERS = 2
ROTATED = {"rms_norm": 1, "add_rms_norm": 2 * NUM_LAYERS, "rotate_and_store": NUM_LAYERS}
GATED = {**ROTATED, "silu_and_multiply": NUM_LAYERS}
BY_TWO_EXPERTS = {**ROTATED, "silu_and_multiply": 2 * NUM_LAYERS}
HEAD_NORMS = {"rms_norm": 1 + 2 * NUM_LAYERS}
CALLS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {  # of a step with one token, by family
    "llama": ({}, GATED),
    "mistral": ({}, GATED),
    "qwen2": ({"head_dim": ...}, GATED),
    "qwen3": ({}, {**GATED, **HEAD_NORMS}),
    "mixtral": ({"num_experts_per_tok": 2}, BY_TWO_EXPERTS),
    "qwen3_moe": ({"num_experts_per_tok": 2}, {**BY_TWO_EXPERTS, **HEAD_NORMS}),
    "gpt2": (
        {},
        {
            "layer_norm": 1,
            "add_layer_norm": 2 * NUM_LAYERS,
            "rotate_and_store": NUM_LAYERS,
            "gelu_tanh": NUM_LAYERS,
        },
    ),
}
NAMES = sorted({name for _, calls in CALLS.values() for name in calls})


class Replacements:
    """All ops of the module, counted where they are called from elsewhere; `wrong` gives twice what it should."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: Counter[str] = Counter()
        self.wrong: str | None = None
        self._is_inside = False
        for name in NAMES:
            monkeypatch.setattr(ops, name, self._replaced(name, getattr(ops, name)))

    def _replaced(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if self._is_inside:
                return function(*arguments)
            self.calls[name] += 1
            self._is_inside = True
            try:
                result = function(*arguments)
            finally:
                self._is_inside = False
            if name != self.wrong:
                return result
            return 2 * result if isinstance(result, Tensor) else (2 * result[0], *result[1:])

        return call


@pytest.mark.parametrize("family", CALLS)
def test_every_family_computes_through_the_named_ops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    overrides, expected = CALLS[family]
    model = load(write_tiny_model(tmp_path, family, **overrides), SingleRank())
    replacements = Replacements(monkeypatch)

    def logits() -> Tensor:
        """Of a decode after three other tokens."""
        runner = Runner(model, SingleRank(), worker_config(), num_blocks=1)
        runner.execute(StepPlan(0, 0, new=(NewSequence(SequenceId(0), (7, 1, 3, 9), 4, GREEDY, (0,), 0, 3),)))
        replacements.calls.clear()
        runner.execute(StepPlan(0, 1, known=(KnownSequence(SequenceId(0), 1),)))
        return model.logits[-1]

    right = logits()
    assert replacements.calls == expected
    for name in expected:
        replacements.wrong = name
        assert not torch.allclose(logits(), right), f"what {name} gives is not used"


def attend_on_a_cpu(cache: KvCache, stream: Stream) -> None:
    step = PagedAttention(cache, 4).prepare(
        AttentionMetadata(torch.arange(5), (QueryRange(0, 5, 5),), 0, np.array([[0]]))
    )
    step.attend(LAYER, stream.heads, stream.value, None, None)


def attend_compiled(cache: KvCache, stream: Stream) -> None:
    kernels = cpu_kernels()
    if kernels is None:
        pytest.skip("this machine has no C compiler")
    step = CompiledAttention(cache, kernels).prepare(
        AttentionMetadata(torch.arange(5), (QueryRange(0, 5, 5),), 0, np.array([[0]]))
    )
    step.attend(LAYER, stream.heads, stream.value, None, None)


ATTENTIONS: dict[str, Callable[[KvCache, Stream], object]] = {
    "on a CPU": attend_on_a_cpu,
    "on a CPU, compiled": attend_compiled,
    "paged": lambda cache, stream: attend(
        PagedFlash(cache, Varlen(varlen_by_formula)), cache.block_size, [stream], [(0, 5)]
    ),
    "gathered": lambda cache, stream: attend(
        GatheredFlash(cache, Varlen(varlen_by_formula), attend_by_formula), cache.block_size, [stream], [(0, 5)]
    ),
    "reference": lambda cache, stream: attend(ReferenceAttention(cache), cache.block_size, [stream], [(0, 5)]),
}


@pytest.mark.parametrize("name", ATTENTIONS)
def test_every_attention_stores_through_the_named_op(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    shape = Shape(4, 2, head_dim=16)
    stream = Stream(shape, 5, [0], seed=0)

    def stored() -> Tensor:
        cache = make_cache(shape, 1, 8)
        ATTENTIONS[name](cache, stream)
        return cache.layers[LAYER]

    assert stored().any()

    def store_nothing(
        heads: Tensor, value: Tensor, rotation: Rotation | None, cache: Tensor, places: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, ...]:
        return heads.tensor_split((-value.shape[1],), dim=1)

    monkeypatch.setattr(ops, "rotate_and_store", store_nothing)
    assert not stored().any()
