"""A plan for people, as tables, and for programs. Knows `ServingPlan`; works nothing out."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from cluster.config import ClusterConfig
from cluster.driver.sizing import CPU_LIMIT
from cluster.planning import Prediction, ServingPlan
from model_shards.plan import TensorCut


def report(made: ServingPlan, config: ClusterConfig) -> Iterator[RenderableType]:
    """In the order in which it reads best."""
    ranks = f"{len(made.plan.ranks)} {made.device} rank(s)"
    yield f"{made.model}: {made.plan.spec.architecture}, {made.dtype} on {ranks}"
    yield _ranks(made)
    tokens = f"{made.num_blocks} blocks of {made.block_size} = {made.kv_tokens} tokens"
    yield f"KV cache: {tokens}: {kv_rule(made, config)}"
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


def kv_rule(made: ServingPlan, config: ClusterConfig) -> str:
    """What limits the KV cache."""
    if config.kv_cache_memory is not None:
        return f"kv_cache_memory is {size_in_words(config.kv_cache_memory)} over all ranks"
    if made.gpu_memory is None:
        return f"{size_in_words(CPU_LIMIT)} over all ranks, the default on CPU where as much is free"
    return (
        f"what the weights leave of {config.gpu_memory_share:.0%} of {size_in_words(made.gpu_memory)}; the "
        f"activations of the largest step, which a start measures, come off that"
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
    table = _table("rank", "heads Q+KV", "FFN", "weights", "KV/token", "KV cache", "both")
    for rank in made.plan.ranks:
        kv_bytes = made.kv_bytes(rank)
        table.add_row(
            str(rank.rank),
            f"{rank.query_heads}+{rank.kv_heads}",
            str(rank.ffn_columns),
            size_in_words(rank.weight_bytes),
            size_in_words(rank.kv_bytes_per_token),
            size_in_words(kv_bytes),
            size_in_words(rank.weight_bytes + kv_bytes),
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
    table = _table("step, in ms", "compute", "memory", "all-reduce", "total", "tok/s")
    for prediction in predictions:
        seconds = prediction.seconds
        parts = (seconds[part] for part in ("compute", "memory", "all_reduce", "total"))
        table.add_row(prediction.name, *(_ms(part) for part in parts), f"{prediction.tokens_per_s:,.0f}")
    return table


def _table(first: str, *others: str) -> Table:
    table = Table()
    table.add_column(first, no_wrap=True)
    for heading in others:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def size_in_words(number: int) -> str:
    """2147483648 -> 2.0 GiB"""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number} B"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f}"
