"""Deltas reach the receiver in order, and what piles up behind a slow call goes with the next one."""

import threading
from collections.abc import Sequence

from cluster.engine.publishing import Publisher
from cluster.generation import TokenDelta

_PATIENCE_S = 60.0


def delta(token: int) -> TokenDelta:
    return TokenDelta("r", 0, (token,))


def test_a_backlog_is_one_call() -> None:
    calls: list[list[int]] = []
    entered, release = threading.Event(), threading.Event()

    def publish(deltas: Sequence[TokenDelta]) -> None:
        entered.set()
        assert release.wait(_PATIENCE_S)
        calls.append([token for each in deltas for token in each.token_ids])

    publisher = Publisher(publish)
    publisher.start()
    publisher.put([delta(0)])
    assert entered.wait(_PATIENCE_S)
    for number in range(1, 6):
        publisher.put([delta(number)])
    release.set()
    publisher.close(_PATIENCE_S)
    assert calls == [[0], [1, 2, 3, 4, 5]]


def test_close_leaves_a_receiver_that_hangs() -> None:
    release = threading.Event()
    publisher = Publisher(lambda deltas: assert_released(release))
    publisher.start()
    publisher.put([delta(0)])
    publisher.close(0.01)
    assert publisher._thread.is_alive()
    release.set()
    publisher._thread.join(_PATIENCE_S)
    assert not publisher._thread.is_alive()


def assert_released(release: threading.Event) -> None:
    assert release.wait(_PATIENCE_S)
