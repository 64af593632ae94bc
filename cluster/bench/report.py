"""Figures for people and for programs. Knows `LevelSummary`; measures nothing."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from cluster.bench.load import BenchPlan
from cluster.bench.summary import LevelSummary


def table(model: str, plan: BenchPlan, levels: Sequence[LevelSummary]) -> Table:
    """One row a level; failures in their own column, so that they cannot be overlooked."""
    title = f"{model} at {plan.url}: {plan.input_len} tokens in, {plan.output_len} out"
    result = Table(title=title, title_justify="left")
    result.add_column("load")
    for heading in ("done", "failed", "output tok/s", "TTFT ms", "p99", "ITL ms", "p99", "TPOT ms", "p99"):
        result.add_column(heading, justify="right")
    for level in levels:
        failed = level.failed + level.unfinished
        result.add_row(
            level.load,
            str(level.completed),
            f"[red]{failed}[/red]" if failed else "0",
            f"{level.output_tokens_per_s:.1f}",
            *_cells(level),
        )
    return result


def _cells(level: LevelSummary) -> list[str]:
    spreads = (level.ttft_ms, level.itl_ms, level.tpot_ms)
    return [
        "-" if value is None else f"{value:.1f}" for spread in spreads for value in (spread.median, spread.p99)
    ]


def notes(levels: Sequence[LevelSummary]) -> list[str]:
    """What the table's numbers leave out, one line each."""
    lines = [f"{level.load}: {count} x {reason}" for level in levels for reason, count in level.failures.items()]
    lines += [
        f"{level.load}: {level.unfinished} requests were cut off by the time limit"
        for level in levels
        if level.unfinished
    ]
    if any(level.completed and not level.tokens_from_usage for level in levels):
        lines.append("The server reports no usage: one chunk of text is counted as one token.")
    return lines


def as_json(model: str, plan: BenchPlan, levels: Sequence[LevelSummary]) -> dict[str, Any]:
    """Everything that was measured, and what it was measured with."""
    return {
        "url": plan.url,
        "model": model,
        "input_len": plan.input_len,
        "output_len": plan.output_len,
        "ignore_eos": plan.ignore_eos,
        "seed": plan.seed,
        "levels": [level.as_dict() for level in levels],
    }
