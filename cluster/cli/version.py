"""`shardserve version`."""

import typer


def version() -> None:
    """Print the version."""
    from importlib.metadata import version as installed

    typer.echo(f"shardserve {installed('shardserve')}")


def print_version(wanted: bool) -> None:
    """`--version`: print and leave before anything else is looked at."""
    if wanted:
        version()
        raise typer.Exit
