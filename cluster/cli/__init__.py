"""The command line: `shardserve serve | generate | plan | bench | demo | version`.

Each command lives in its own module and imports what it runs with only when it runs, so that `--help` is quick and
loads neither Ray nor torch.
"""

from typing import Annotated

import typer

from cluster.cli.bench import bench
from cluster.cli.demo import demo
from cluster.cli.generate import generate
from cluster.cli.plan import plan
from cluster.cli.serve import serve
from cluster.cli.version import print_version, version

app = typer.Typer(
    name="shardserve",
    help="Tensor-parallel inference of language models on Ray, with an OpenAI-compatible HTTP API.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its panels cut the names of options in a terminal of 80 columns
)
app.command()(serve)
app.command()(generate)
app.command()(plan)
app.command()(bench)
app.command()(demo)
app.command()(version)


@app.callback()
def _root(
    show_version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of the program as a whole."""


def main() -> None:
    """Entry point of the installed command."""
    app()
