"""What an ingress sees of its requests: how long clients wait for tokens, and how many they are billed.

Knows sizes, choices and a clock; knows nothing of text, HTTP or metric names.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from cluster.metrics.histogram import Histogram, HistogramSnapshot

_FIRST_TOKEN_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_NEXT_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_REQUEST_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingStats:
    """Times are in seconds, from the submission of a checked request on."""

    first_token: HistogramSnapshot  # one value a request
    next_token: (
        HistogramSnapshot  # between two messages with tokens of one choice; a late reader gets fewer of them
    )
    request: HistogramSnapshot  # one value a request of which every choice has finished
    completion_tokens: int  # as `usage` tells them, and as they were handed on: clients that leave are in it


class ServingMeter:
    """Of one ingress, on one event loop. Invariant: a request's tokens are counted before they are handed on."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.first_token = Histogram(_FIRST_TOKEN_S)
        self.next_token = Histogram(_NEXT_TOKEN_S)
        self.request = Histogram(_REQUEST_S)
        self.completion_tokens = 0

    def watch(self) -> "RequestWatch":
        """A request is submitted now."""
        return RequestWatch(self)

    def snapshot(self) -> ServingStats:
        return ServingStats(
            first_token=self.first_token.snapshot(),
            next_token=self.next_token.snapshot(),
            request=self.request.snapshot(),
            completion_tokens=self.completion_tokens,
        )


class RequestWatch:
    """One request, from its submission to the end of its last choice."""

    def __init__(self, meter: ServingMeter) -> None:
        self._meter = meter
        self._started = meter.clock()
        self._last: dict[int, float] = {}  # when each choice gained tokens last

    def gained(self, choice: int, num_tokens: int) -> None:
        """A choice is about to be handed so many tokens to bill."""
        if num_tokens == 0:
            return
        meter, now = self._meter, self._meter.clock()
        meter.completion_tokens += num_tokens
        before = self._last.get(choice)
        if before is not None:
            meter.next_token.observe(now - before)
        elif not self._last:
            meter.first_token.observe(now - self._started)
        self._last[choice] = now

    def finished(self) -> None:
        """Every choice has."""
        self._meter.request.observe(self._meter.clock() - self._started)
