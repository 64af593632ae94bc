"""One deadline over the parts of a start."""

import threading

import pytest

from cluster.driver.patience import Patience
from cluster.errors import StartupFailed


def test_parts_share_a_deadline_and_are_told_apart() -> None:
    now = 100.0
    patience = Patience(10.0, clock=lambda: now)
    now = 103.0
    patience.note("spawn")
    now = 107.5
    patience.note("group", load=3.5)
    assert list(patience.parts.items()) == [("spawn", 3.0), ("group", 1.0), ("load", 3.5)]
    assert (patience.spent(), patience.left()) == (7.5, 2.5)
    now = 200.0
    assert patience.left() == 0.0


def test_it_can_be_cancelled() -> None:
    cancelled = threading.Event()
    patience = Patience(10.0, cancelled)
    assert patience.left() > 0
    cancelled.set()
    with pytest.raises(StartupFailed, match="cancelled"):
        patience.left()
