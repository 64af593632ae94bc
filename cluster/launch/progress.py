"""What a start shows while it happens: one line a part, with its seconds. Knows a terminal; starts nothing."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape

_WIDTH = 14


class Progress:
    """Parts in the order in which they end. On a terminal the part that runs has a spinner and its latest note."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = console.status("")
        self._part = ""
        self.started = time.monotonic()
        self.seconds: dict[str, float] = {}  # part -> how long it took

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Show `name` as running; print its line when it has succeeded, nothing when it has failed."""
        began = time.monotonic()
        self._part = name
        self._status.update(f"{name} ...")
        self._status.start()
        try:
            yield
        finally:
            self._status.stop()
            self._part = ""
        self.done(name, time.monotonic() - began)

    def note(self, text: str) -> None:
        """What the running part is doing now."""
        if self._console.is_terminal and self._part:
            self._status.update(f"{self._part}: {escape(text)}")
        else:
            self._console.print(f"  {text}", markup=False, highlight=False)

    def say(self, text: str) -> None:
        """A line that stays, about what the running part has reached."""
        self._console.print(f"    {text}", markup=False, highlight=False, style="dim", soft_wrap=True)

    def done(self, name: str, seconds: float, remark: str = "") -> None:
        """Print the line of a part that has ended."""
        self.seconds[name] = seconds
        tail = f"  {escape(remark)}" if remark else ""
        self._console.print(f"  {name:<{_WIDTH}} {seconds:5.1f} s{tail}", highlight=False)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started
