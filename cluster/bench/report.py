"""Figures for people and for programs. Knows `LevelSummary`; measures nothing."""

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

from cluster.bench.load import BenchPlan
from cluster.bench.summary import LevelSummary, Spread


def table(model: str, plan: BenchPlan, levels: Sequence[LevelSummary]) -> Table:
    """One row a level; failures in their own column, so that they cannot be overlooked. `wait` is there where the
    server tells which share of their time its workers waited for its driver.
    """
    title = f"{model} at {plan.url}: {plan.input_len} tokens in, {plan.output_len} out; times in ms, median / p99"
    result = Table(title=title, title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0))
    result.add_column("load", no_wrap=True)
    for heading in ("done", "failed", "tok/s", "TTFT", "ITL", "TPOT"):
        result.add_column(heading, justify="right", no_wrap=True)
    has_wait = any(level.worker_wait_share is not None for level in levels)
    if has_wait:
        result.add_column("wait", justify="right", no_wrap=True)
    for level in levels:
        failed = level.failed + level.unfinished
        result.add_row(
            level.load,
            str(level.completed),
            f"[red]{failed}[/red]" if failed else "0",
            f"{level.output_tokens_per_s:.1f}",
            *(_cell(spread) for spread in (level.ttft_ms, level.itl_ms, level.tpot_ms)),
            *([_share(level.worker_wait_share)] if has_wait else []),
        )
    return result


def _cell(spread: Spread) -> str:
    if spread.median is None or spread.p99 is None:
        return "-"
    return f"{_milliseconds(spread.median)} / {_milliseconds(spread.p99)}"


def _milliseconds(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


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
    if any(level.worker_wait_share is not None for level in levels):
        lines.append("wait: the share of their time in which the workers waited for the driver.")
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
