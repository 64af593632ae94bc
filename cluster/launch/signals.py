"""Ctrl-C and SIGTERM: the first asks for an orderly end, the second ends at once. Knows signals only."""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequested(KeyboardInterrupt):
    """Someone asked this program to end while it was starting."""


class StopSignals:
    """Turns stop signals into `StopRequested` until `quiet`, then into an event; a second one calls `end_hard`.

    Used in the main thread, as a context manager.
    """

    def __init__(self, end_hard: Callable[[], None]) -> None:
        self._end_hard = end_hard
        self._raises = True
        self._requested = threading.Event()
        self._before = [signal.getsignal(number) for number in _SIGNALS]

    def __enter__(self) -> "StopSignals":
        self.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in zip(_SIGNALS, self._before, strict=True):
            signal.signal(number, handler)

    def install(self) -> None:
        """Take the signals (again: `ray.init` puts its own handler on SIGTERM)."""
        for number in _SIGNALS:
            signal.signal(number, self._receive)

    def quiet(self) -> None:
        """From now on a first signal only sets the event: whoever serves or ends is not interrupted."""
        self._raises = False

    def wait(self, timeout_s: float) -> bool:
        """True as soon as a stop has been asked for."""
        return self._requested.wait(timeout_s)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._requested.is_set():
            self._end_hard()
            return
        self._requested.set()
        if self._raises:
            raise StopRequested
