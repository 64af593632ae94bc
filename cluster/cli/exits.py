"""How a command ends: a known error is one line each on stderr and an exit code, never a stack trace.

2    the user's mistake: an option, a setting, a model name, a request file
1    it could not be started, or broke
130  interrupted
"""

from collections.abc import Iterator
from contextlib import contextmanager

import typer

MISTAKE = 2
FAILURE = 1
INTERRUPTED = 130


@contextmanager
def exits() -> Iterator[None]:
    """Turn our errors into exit codes; what we do not know keeps its traceback, because it is a bug."""
    from cluster.errors import InvalidConfig, InvalidRequest, ShardserveError
    from model_shards.errors import ModelError

    try:
        yield
    except (InvalidConfig, InvalidRequest, ModelError) as error:
        _say(error)
        raise typer.Exit(MISTAKE) from None
    except ShardserveError as error:
        _say(error)
        raise typer.Exit(FAILURE) from None
    except BrokenPipeError:
        raise typer.Exit(FAILURE) from None  # the reader of our output left, as `| head` does
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def _say(error: Exception) -> None:
    for line in str(error).splitlines():
        typer.secho(f"error: {line}", fg=typer.colors.RED, err=True)
