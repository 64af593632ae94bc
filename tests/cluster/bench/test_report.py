"""The table for people."""

import io

from rich.console import Console

from cluster.bench.load import BenchPlan
from cluster.bench.report import table
from cluster.bench.summary import LevelSummary, Spread


def test_the_table_fits_a_terminal_of_80_columns() -> None:
    level = LevelSummary(
        load="32 at once",
        duration_s=1.0,
        completed=9999,
        failed=0,
        unfinished=0,
        failures={},
        prompt_tokens_mean=128.0,
        output_tokens=1,
        output_tokens_per_s=1234.56,
        requests_per_s=1.0,
        tokens_from_usage=True,
        worker_wait_share=0.1234,
        ttft_ms=Spread(11518.04, 28580.06),
        itl_ms=Spread(12.34, 98.76),
        tpot_ms=Spread(None, None),
    )
    screen = io.StringIO()
    Console(file=screen, width=80).print(table("model", BenchPlan(url="http://x"), [level]))
    for text in ("32 at once", "9999", "1234.6", "11518 / 28580", "12.3 / 98.8", "-", "12.3%"):
        assert text in screen.getvalue()
