"""`shardserve bench`: load on any OpenAI-compatible server, as a table and as JSON."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.cli import options
from cluster.cli.exits import FAILURE, exits

if TYPE_CHECKING:
    from rich.console import Console

    from cluster.bench.load import BenchPlan
    from cluster.bench.summary import LevelSummary

_DEFAULT_LEVELS = "1,8,32"


def bench(
    url: Annotated[str, typer.Argument(metavar="URL", help="The server, e.g. http://127.0.0.1:8000")],
    model: Annotated[
        str | None,
        typer.Option(help="Model to ask for (default: the first the server names).", show_default=False),
    ] = None,
    concurrency: Annotated[
        str | None,
        typer.Option(
            metavar="N[,N...]",
            help="Closed loop: requests in flight, one level each (default: 1,8,32).",
            show_default=False,
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(help="Open loop instead: requests per second, Poisson arrivals.", show_default=False),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(help="Requests a level (default: 4 alone, else 3 for each in flight).", show_default=False),
    ] = None,
    input_len: Annotated[int, typer.Option(help="Prompt tokens, about: measured by the server's usage.")] = 128,
    output_len: Annotated[int, typer.Option(help="Tokens to generate.")] = 64,
    ignore_eos: Annotated[
        bool, typer.Option(help="Generate all tokens (an extension; switch off for servers that refuse it).")
    ] = True,
    level_limit_s: Annotated[float, typer.Option(help="Seconds a level may take; the rest is cut off.")] = 300.0,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Of prompts and arrivals (default: a new one: no cache knows the prompts).", show_default=False
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all figures there.", show_default=False)
    ] = None,
) -> None:
    """Measure TTFT, ITL, TPOT and throughput of the server at URL."""
    with exits():
        import secrets

        from cluster.bench.load import BenchPlan
        from cluster.errors import InvalidConfig

        if rate is not None and concurrency is not None:
            raise InvalidConfig("--concurrency is for a closed loop and --rate for an open one: give one of them")
        plan = BenchPlan(
            url=url,
            model=model,
            concurrency=options.whole_numbers("--concurrency", concurrency or _DEFAULT_LEVELS),
            rate=rate,
            requests=requests,
            input_len=input_len,
            output_len=output_len,
            ignore_eos=ignore_eos,
            level_limit_s=level_limit_s,
            seed=secrets.randbelow(2**31) if seed is None else seed,
        )
        if not _run(plan, json_file):
            raise typer.Exit(FAILURE)


def _run(plan: "BenchPlan", json_file: Path | None) -> bool:
    """Measure, show and write. False when any request failed."""
    import asyncio
    import json

    from rich.console import Console

    from cluster.bench import report
    from cluster.errors import InvalidConfig

    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise InvalidConfig(f"--json: there is no folder {json_file.absolute().parent}")
    console = Console()
    model, levels = asyncio.run(_measure(plan, console))
    console.print(report.table(model, plan, levels))
    for line in report.notes(levels):
        console.print(line, markup=False, highlight=False)
    if json_file is not None:
        json_file.write_text(json.dumps(report.as_json(model, plan, levels), indent=2) + "\n", encoding="utf-8")
    return not any(level.failed or level.unfinished for level in levels)


async def _measure(plan: "BenchPlan", console: "Console") -> tuple[str, list["LevelSummary"]]:
    from cluster.bench.load import measure

    model, levels = plan.model or "", []
    with console.status("warming up") as status:
        async for model, level in measure(plan):  # noqa: B007
            levels.append(level)
            status.update(f"{level.load}: {level.output_tokens_per_s:.1f} tok/s")
    return model, levels
