"""An ingress's connection to one driver: every request of the ingress over one streaming subscription.

Demultiplexes deltas to per-request inboxes that merge what waits, renews the lease, and after a driver's death
fails what was open and subscribes again. One connection a driver; an ingress with several drivers holds several.
Lives on one event loop. Knows tokens and a driver's calls; knows nothing of text, HTTP or Ray.
"""

import asyncio
import contextvars
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, assert_never

from cluster.driver.delta_codec import Closed, Deltas, Hello, decode
from cluster.driver.handle import DriverHandle
from cluster.driver.silence import Silence
from cluster.driver.status import DriverStatus
from cluster.driver.subscriptions import HEARTBEAT_S, LEASE_S, merge
from cluster.errors import ShardserveError, Unavailable
from cluster.generation import FinishReason, GenerationRequest, TokenDelta

logger = logging.getLogger(__name__)

SUBMIT_DEADLINE_S = 5.0
_FIRST_BACKOFF_S = 0.1
_LAST_BACKOFF_S = 2.0
_LOOKS_PER_HEARTBEAT = 4
_LATE_S = 1.5  # a driver silent for so long is not counted on, though what is open waits for it


class _Inbox:
    """The deltas of one request that nobody has taken yet: at most one for each choice."""

    def __init__(self, choices: int) -> None:
        self.open_choices = set(range(choices))
        self._pending: dict[int, TokenDelta] = {}
        self._error: ShardserveError | None = None
        self._changed = asyncio.Event()

    def put(self, delta: TokenDelta) -> None:
        if delta.choice not in self.open_choices:
            return
        waiting = self._pending.get(delta.choice)
        self._pending[delta.choice] = delta if waiting is None else merge(waiting, delta)
        if delta.finish_reason is not None:
            self.open_choices.discard(delta.choice)
        self._changed.set()

    def finish(self, choice: int) -> None:
        self.open_choices.discard(choice)
        self._pending.pop(choice, None)
        self._changed.set()

    def fail(self, error: ShardserveError) -> None:
        self._error = self._error or error
        self.open_choices.clear()
        self._changed.set()

    async def deltas(self) -> AsyncIterator[TokenDelta]:
        while True:
            while self._pending:
                delta = self._pending.pop(next(iter(self._pending)))
                if delta.finish_reason is FinishReason.ERROR:
                    raise Unavailable(delta.error or "the engine failed")
                yield delta
            if self._error is not None:
                raise self._error
            if not self.open_choices:
                return
            self._changed.clear()
            await self._changed.wait()


class DriverConnection:
    """A `TokenSource` across the cluster. Start it on the loop that will use it; close it when done."""

    def __init__(self, driver: DriverHandle, clock: Callable[[], float] = time.monotonic) -> None:
        self._driver = driver
        self._look_s = HEARTBEAT_S / _LOOKS_PER_HEARTBEAT
        self._silence = Silence(clock, limit_s=LEASE_S, look_s=self._look_s)
        self._subscriber_id = ""
        self._lease_id: str | None = None  # None: no driver at the moment
        self._was_connected = False
        self._inboxes: dict[str, _Inbox] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._loops: list[asyncio.Task[None]] = []
        self._connected = asyncio.Event()
        self._lease_lost = asyncio.Event()
        self._status: DriverStatus | None = None
        self._cause = "the driver is starting"

    @property
    def unavailable_because(self) -> str | None:
        """Why no token can be made now; None when one can."""
        if self._lease_id is None:
            return self._cause
        if self._silence.lasts_s > _LATE_S:
            return f"the driver has said nothing for {self._silence.lasts_s:.1f} s"
        return self._status.unavailable_because if self._status is not None else None

    @property
    def status(self) -> DriverStatus | None:
        """What the driver said at its last heartbeat."""
        return self._status

    @property
    def is_connected(self) -> bool:
        """Whether the driver holds our lease."""
        return self._lease_id is not None

    @property
    def num_requests(self) -> int:
        """Ours that have not ended."""
        return len(self._inboxes)

    def start(self) -> None:
        loops = (self._keep_subscribed(), self._keep_lease(), self._watch_silence())
        self._loops = [asyncio.create_task(loop) for loop in loops]

    async def wait_connected(self, deadline_s: float) -> None:
        """Raises `Unavailable` when there is no driver by the deadline."""
        try:
            async with asyncio.timeout(deadline_s):
                await self._connected.wait()
        except TimeoutError:
            raise Unavailable(f"no driver within {deadline_s:g} s: {self._cause}") from None

    async def close(self) -> None:
        """End the subscription; open requests fail. Idempotent."""
        tasks = [*self._loops, *self._background]
        self._loops = []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._disconnect("the ingress is stopping")

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[TokenDelta, None]:
        """See `TokenSource.stream`."""
        if self._lease_id is None:
            raise Unavailable(self._cause)
        inbox = _Inbox(request.sampling.n)
        self._inboxes[request.request_id] = inbox
        submission = _detached(self._driver.submit(self._subscriber_id, request))
        try:
            try:
                # Not `wait_for`: before Python 3.12 it forgets a cancellation that comes with the answer.
                async with asyncio.timeout(SUBMIT_DEADLINE_S):
                    await asyncio.shield(submission)
            except TimeoutError:
                raise Unavailable(f"the driver did not take the request within {SUBMIT_DEADLINE_S:g} s") from None
            async for delta in inbox.deltas():
                yield delta
        finally:
            del self._inboxes[request.request_id]
            if inbox.open_choices:
                self._spawn(self._abort_after(submission, request.request_id))

    async def finish_choice(self, request_id: str, choice: int) -> None:
        """See `TokenSource.finish_choice`."""
        inbox = self._inboxes.get(request_id)
        if inbox is not None and choice in inbox.open_choices:
            inbox.finish(choice)
            self._spawn(self._tell(lambda: self._driver.finish_choice(request_id, choice)))

    async def _abort_after(self, submission: "asyncio.Future[None]", request_id: str) -> None:
        """A request that is still on its way could otherwise overtake its own abort."""
        with suppress(ShardserveError):
            await submission
            await self._tell(lambda: self._driver.abort(request_id))

    async def _tell(self, call: Callable[[], Awaitable[None]]) -> None:
        """A driver that is slow must hear of every end; what one that is gone had of ours ends with the lease."""
        lease_id = self._lease_id
        while lease_id is not None and lease_id == self._lease_id:
            with suppress(ShardserveError):
                await call()
                return
            await asyncio.sleep(HEARTBEAT_S)

    async def _keep_subscribed(self) -> None:
        backoff_s = _FIRST_BACKOFF_S
        while True:
            try:
                await self._read_while_leased()
                backoff_s = _FIRST_BACKOFF_S
            except ShardserveError as error:
                self._disconnect(str(error))
                await asyncio.sleep(backoff_s)
                backoff_s = min(_LAST_BACKOFF_S, backoff_s * 2)

    async def _read_while_leased(self) -> None:
        self._lease_lost.clear()
        if self._lease_id is None:  # what the driver may still have of ours has failed here: that lease is to end
            self._subscriber_id = uuid.uuid4().hex
        reader = asyncio.create_task(self._read())
        loss = asyncio.create_task(self._lease_lost.wait())
        try:
            await asyncio.wait((reader, loss), return_when=asyncio.FIRST_COMPLETED)
        finally:
            reader.cancel()
            loss.cancel()
        if reader.done():
            reader.result()

    async def _read(self) -> None:
        """One stream, from its Hello to its end."""
        async for data in self._driver.subscribe(self._subscriber_id):
            self._silence.end()  # whoever sends is alive, though a heartbeat be late
            match decode(data):
                case Hello(lease_id):
                    self._connect(lease_id)
                case Deltas(deltas):
                    for delta in deltas:
                        inbox = self._inboxes.get(delta.request_id)
                        if inbox is not None:
                            inbox.put(delta)
                case Closed(error):
                    raise Unavailable(error)
                case other:
                    assert_never(other)

    async def _keep_lease(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            if self._lease_id is None:
                continue
            with suppress(ShardserveError, TimeoutError):
                async with asyncio.timeout(LEASE_S):
                    status = await self._driver.heartbeat(self._subscriber_id)
                self._status = status
                if status.lease:
                    self._silence.end()

    async def _watch_silence(self) -> None:
        while True:
            await asyncio.sleep(self._look_s)
            if self._lease_id is None:
                self._silence.end()
            elif self._silence.too_long():
                self._disconnect(f"the driver has said nothing for {LEASE_S:g} s")
                self._lease_lost.set()

    def _connect(self, lease_id: str) -> None:
        if self._lease_id not in (None, lease_id):
            self._disconnect("the driver was replaced, or no longer holds our lease")
        self._lease_id = lease_id
        self._was_connected = True
        self._connected.set()

    def _disconnect(self, cause: str) -> None:
        """The first cause stays: that the driver is gone says less than why it went."""
        if self._lease_id is not None or not self._was_connected:
            self._cause = cause
        self._lease_id = None
        self._status = None
        self._connected.clear()
        if self._inboxes:
            logger.warning("%d open requests fail: %s", len(self._inboxes), cause)
        for inbox in self._inboxes.values():
            inbox.fail(Unavailable(cause))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = _detached(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _detached(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Run `work` outside the request's context. Serve knows by that context which calls belong to a request, and
    cancels them with it: the abort of a client that has left, too.
    """
    return asyncio.create_task(work, context=contextvars.Context())
