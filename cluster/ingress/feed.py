"""The text of one HTTP request: all its prompts and choices, run together and merged for one reader.

Knows a `Completer` and text deltas; knows nothing of HTTP or JSON.
"""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Self

from cluster.generation import GenerationRequest, TextDelta
from cluster.text.completer import Completer


class Feed:
    """Runs prepared requests while it is entered; leaving it aborts what still runs.

    Choices are numbered through the requests. Invariant: at most one delta of each choice waits, so a reader that
    is behind finds one long piece of text and never a backlog.
    """

    def __init__(self, completer: Completer, requests: Sequence[GenerationRequest]) -> None:
        self._completer = completer
        self._requests = requests
        self._waiting: dict[int, TextDelta] = {}
        self._error: Exception | None = None
        self._unstarted = len(requests)
        self._running = len(requests)
        self._changed = asyncio.Event()
        self._pumps: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        first_choice = 0
        for request in self._requests:
            self._pumps.append(asyncio.create_task(self._pump(request, first_choice)))
            first_choice += request.sampling.n
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def started(self) -> None:
        """Returns when every request has given its first delta. Raises what refused or failed one of them."""
        while self._unstarted and self._error is None:
            await self._change()
        if self._error is not None:
            raise self._error

    async def take(self) -> dict[int, TextDelta]:
        """What has come since the last call, by choice; waits for it. Empty when every choice has finished.

        Raises what a request failed with, once all that came before it has been taken.
        """
        while not self._waiting:
            if self._error is not None:
                raise self._error
            if not self._running:
                return {}
            await self._change()
        taken, self._waiting = self._waiting, {}
        return taken

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def _pump(self, request: GenerationRequest, first_choice: int) -> None:
        started = False
        try:
            async with aclosing(self._completer.stream(request)) as deltas:
                async for delta in deltas:
                    self._put(first_choice + delta.choice, delta)
                    if not started:
                        started = True
                        self._unstarted -= 1
            self._running -= 1
        except Exception as error:
            self._error = self._error or error  # the reader raises it
        self._changed.set()

    def _put(self, choice: int, delta: TextDelta) -> None:
        before = self._waiting.get(choice)
        self._waiting[choice] = delta if before is None else before.followed_by(delta)
        self._changed.set()
