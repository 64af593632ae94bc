"""Stop strings in a running text. Knows characters; knows nothing of tokens.

The text ends where the first stop string is complete, as if it came character by character, so the result does not
depend on how it was cut into pieces. When two are complete at the same character, the longer one counts.
"""

from collections.abc import Sequence


class StopMatcher:
    """Watches one text for stop strings.

    Invariant: no released character belongs to a stop string, unless the match is to be included, and what is
    held back is the longest tail that a stop string begins with, no more.
    """

    def __init__(self, stop: Sequence[str], *, include_match: bool = False) -> None:
        self._stop = tuple(stop)
        self._include_match = include_match  # the text ends with the stop string instead of before it
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """What can be released now that `text` has come. Nothing is, once a stop string has matched."""
        if self.matched is not None:
            return ""
        if not self._stop:
            return text
        window = self._held + text
        end = self._find(window)
        if end is not None:
            self._held = ""
            return window[:end]
        keep = max(_overlap(window, stop) for stop in self._stop)
        self._held = window[len(window) - keep :]
        return window[: len(window) - keep]

    def finish(self) -> str:
        """What was held back for a stop string that did not come."""
        held, self._held = self._held, ""
        return held

    def _find(self, window: str) -> int | None:
        """Where the text ends by the stop string that is complete first; remembers it in `matched`."""
        found = [(at + len(stop), at, stop) for stop in self._stop if (at := window.find(stop)) >= 0]
        if not found:
            return None
        end, start, self.matched = min(found)
        return end if self._include_match else start


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that `stop` begins with, short of all of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
