"""A plan for people, as tables, and for programs. Knows `ServingPlan`; works nothing out."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from cluster.planning import Prediction, ServingPlan
from model_shards.plan import TensorCut


def report(made: ServingPlan, kv_rule: str) -> Iterator[RenderableType]:
    """In the order in which it reads best."""
    ranks = f"{len(made.plan.ranks)} {made.device} rank(s)"
    yield f"{made.model}: {made.plan.spec.architecture}, {made.dtype} on {ranks}"
    yield _ranks(made)
    yield f"KV cache: {made.num_blocks} blocks of {made.block_size} = {made.kv_tokens} tokens ({kv_rule})"
    if made.kv_tokens and made.kv_tokens < made.max_model_len:
        yield f"[yellow]max_model_len would be {made.kv_tokens}, not {made.max_model_len}[/yellow]"
    if made.does_not_fit is not None:
        yield f"[red]does not fit: {made.does_not_fit}[/red]"
    yield _cuts(made.plan.cuts)
    yield _predictions(made.predictions)
    ceilings = made.ceilings
    yield (
        f"at best, with {ceilings.flops / 1e12:g} TFLOP/s, {ceilings.memory_bandwidth / 1e9:g} GB/s of memory, "
        f"{ceilings.link_bandwidth / 1e9:g} GB/s and {ceilings.link_latency_s * 1e6:g} us between ranks"
    )


def as_json(made: ServingPlan) -> dict[str, Any]:
    """Everything, in bytes and seconds."""
    return {
        "model": made.model,
        "architecture": made.plan.spec.architecture,
        "device": made.device,
        "dtype": made.dtype,
        "tensor_parallel_size": len(made.plan.ranks),
        "max_model_len": made.max_model_len,
        "gpu_memory": made.gpu_memory,
        "ranks": [
            {**asdict(rank), "weight_bytes": rank.weight_bytes, "kv_bytes": made.kv_bytes(rank)}
            for rank in made.plan.ranks
        ],
        "kv_cache": {"blocks": made.num_blocks, "block_size": made.block_size, "tokens": made.kv_tokens},
        "does_not_fit": made.does_not_fit,
        "tensors": [asdict(cut) for cut in made.plan.cuts],
        "ceilings": asdict(made.ceilings),
        "predictions": [
            {
                "name": prediction.name,
                **asdict(prediction.step),
                "cost": asdict(prediction.cost),
                "seconds": dict(prediction.seconds),
                "tokens_per_s": prediction.tokens_per_s,
            }
            for prediction in made.predictions
        ],
    }


def _ranks(made: ServingPlan) -> Table:
    table = _table(
        "rank", "query heads", "KV heads", "FFN columns", "vocabulary", "weights", "KV a token", "KV cache"
    )
    table.add_column("weights + KV", justify="right", no_wrap=True)
    for rank in made.plan.ranks:
        kv_bytes = made.kv_bytes(rank)
        table.add_row(
            str(rank.rank),
            str(rank.query_heads),
            str(rank.kv_heads),
            str(rank.ffn_columns),
            str(rank.vocabulary),
            _bytes(rank.weight_bytes),
            _bytes(rank.kv_bytes_per_token),
            _bytes(kv_bytes),
            _bytes(rank.weight_bytes + kv_bytes),
        )
    return table


def _cuts(cuts: Sequence[TensorCut]) -> Table:
    table = _table("tensor", "count", "shape", "cut")
    for cut in cuts:
        shape = " x ".join(map(str, cut.shape))
        table.add_row(cut.tensor, str(cut.count), shape, _rule(cut))
    return table


def _rule(cut: TensorCut) -> str:
    if cut.rule == "whole":
        return "whole on every rank"
    shared = ", shared by several ranks" if cut.replicated else ""
    return f"{cut.rule}: {' + '.join(map(str, cut.sizes))}{shared}"


def _predictions(predictions: Sequence[Prediction]) -> Table:
    table = _table("step", "compute", "memory", "all-reduce", "total", "tok/s")
    for prediction in predictions:
        seconds = prediction.seconds
        parts = (seconds[part] for part in ("compute", "memory", "all_reduce", "total"))
        table.add_row(prediction.name, *(_ms(part) for part in parts), f"{prediction.tokens_per_s:.0f}")
    return table


def _table(first: str, *others: str) -> Table:
    table = Table()
    table.add_column(first, no_wrap=True)
    for heading in others:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _bytes(number: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number} B"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
