"""Stop signals: an exception while starting, an event while serving, a hard end the second time."""

import os
import signal

import pytest

from cluster.launch.signals import StopRequested, StopSignals


@pytest.fixture(params=[signal.SIGINT, signal.SIGTERM])
def number(request: pytest.FixtureRequest) -> signal.Signals:
    result: signal.Signals = request.param
    return result


def _send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def test_while_starting_a_signal_interrupts(number: signal.Signals) -> None:
    with pytest.raises(StopRequested), StopSignals(lambda: None):
        _send(number)


def test_while_serving_a_signal_only_asks(number: signal.Signals) -> None:
    with StopSignals(lambda: None) as stop:
        stop.quiet()
        assert not stop.wait(0)
        _send(number)
        assert stop.wait(60)


def test_a_second_signal_ends_hard(number: signal.Signals) -> None:
    ended: list[str] = []
    with StopSignals(lambda: ended.append("hard")) as stop:
        stop.quiet()
        _send(number)
        assert ended == []
        _send(number)
    assert ended == ["hard"]


def test_a_second_signal_ends_hard_after_an_interrupted_start() -> None:
    ended: list[str] = []
    with StopSignals(lambda: ended.append("hard")):
        with pytest.raises(StopRequested):
            _send(signal.SIGINT)
        _send(signal.SIGTERM)
    assert ended == ["hard"]


def test_handlers_are_restored_and_can_be_taken_again() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals(lambda: None) as stop:
        mine = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as `ray.init` does with its own
        stop.install()
        assert signal.getsignal(signal.SIGTERM) == mine
    assert signal.getsignal(signal.SIGTERM) == before
