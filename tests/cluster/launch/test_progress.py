"""What a start shows: a line for each part that succeeded, none for one that failed."""

import io
import re

import pytest
from rich.console import Console

from cluster.launch.progress import Progress


def _progress(*, terminal: bool) -> tuple[Progress, io.StringIO]:
    written = io.StringIO()
    return Progress(Console(file=written, force_terminal=terminal, width=100)), written


@pytest.mark.parametrize("terminal", [False, True])
def test_a_part_that_ends_has_its_line(terminal: bool) -> None:
    progress, written = _progress(terminal=terminal)
    with progress.part("Ray"):
        progress.note("working")
    assert re.search(r"  Ray +\d+\.\d s", written.getvalue())
    assert progress.seconds.keys() == {"Ray"}


def test_a_part_that_fails_has_none() -> None:
    progress, written = _progress(terminal=False)
    with pytest.raises(ValueError, match="broken"), progress.part("Ray"):
        raise ValueError("broken")
    assert written.getvalue() == ""
    assert progress.seconds == {}


def test_notes_are_lines_where_there_is_no_terminal() -> None:
    progress, written = _progress(terminal=False)
    with progress.part("model"):
        progress.note("[50%] fetched")
    assert "  [50%] fetched\n" in written.getvalue()
