"""Who gets which deltas: one outbox for each ingress, held by a lease.

An outbox merges what waits, so a slow reader gets one larger delta for each choice and never a backlog: it is
bounded by the live choices. The lease, not the end of a stream, decides that an ingress is gone: one that was only
slow opens another stream. It is cut short when the ingress's line breaks. Lives on one event loop. Knows requests
and who asked; knows nothing of Serve or engines.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace

from cluster.driver.delta_codec import Closed, Deltas, DriverMessage, Hello
from cluster.errors import Unavailable
from cluster.generation import TokenDelta

LEASE_S = 15.0  # an ingress, or a driver, that is only slow must not cost anybody a stream
LOST_LEASE_S = 2.0  # what is left of it once the ingress's line has broken: the ingress has died, or opens another
HEARTBEAT_S = 0.5  # what an ingress knows of the ranks is so old at the most

_Choice = tuple[str, int]


@dataclass(slots=True)
class _Outbox:
    """One subscriber. `open_choices` has exactly the choices, by request, that may still gain tokens."""

    expires_at: float
    lease_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    open_choices: dict[str, set[int]] = field(default_factory=dict)
    pending: dict[_Choice, TokenDelta] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    stream: int = 0  # number of the stream that may take from this outbox; a later one takes over


class Subscriptions:
    """All subscribers of one driver. Call everything from its event loop."""

    def __init__(self, abort: Callable[[str], None], clock: Callable[[], float], lease_s: float = LEASE_S) -> None:
        self._abort = abort
        self._clock = clock
        self._lease_s = lease_s
        self._looked_at = clock()
        self._outboxes: dict[str, _Outbox] = {}
        self._owners: dict[str, str] = {}  # request id -> subscriber id
        self._closed: Closed | None = None

    @property
    def num_requests(self) -> int:
        return len(self._owners)

    @property
    def is_idle(self) -> bool:
        """Whether every request has ended and everything has been taken."""
        return not self._owners and not any(outbox.pending for outbox in self._outboxes.values())

    async def stream(self, subscriber_id: str) -> AsyncIterator[DriverMessage]:
        """Everything for this subscriber until its lease has run out, it is superseded or all is closed."""
        outbox = self._outboxes.setdefault(subscriber_id, _Outbox(0.0))
        self.renew(subscriber_id)
        outbox.stream += 1
        mine = outbox.stream
        outbox.changed.set()  # wakes a stream that this one supersedes
        yield Hello(outbox.lease_id)
        while outbox.stream == mine:
            if outbox.pending:
                deltas = tuple(outbox.pending.values())
                outbox.pending.clear()
                yield Deltas(deltas)
                continue
            if self._closed is not None:
                yield self._closed
                return
            outbox.changed.clear()
            await outbox.changed.wait()

    def renew(self, subscriber_id: str) -> bool:
        """Extend the lease. False when there is none: it ran out, or this driver is a new one."""
        outbox = self._outboxes.get(subscriber_id)
        if outbox is None:
            return False
        outbox.expires_at = self._clock() + self._lease_s
        return True

    def line_lost(self, subscriber_id: str) -> None:
        """The kernel has closed this subscriber's line: its lease runs out soon, unless it is renewed."""
        outbox = self._outboxes.get(subscriber_id)
        if outbox is not None:
            outbox.expires_at = min(outbox.expires_at, self._clock() + LOST_LEASE_S)

    def own(self, subscriber_id: str, request_id: str, choices: int) -> None:
        """Route a request's deltas to this subscriber. Raises `Unavailable` when it holds no lease here."""
        outbox = self._outboxes.get(subscriber_id)
        if self._closed is not None or outbox is None:
            raise Unavailable("the driver does not know this ingress yet", retry_after_s=1.0)
        outbox.open_choices[request_id] = set(range(choices))
        self._owners[request_id] = subscriber_id

    def disown(self, request_id: str, choice: int | None = None) -> None:
        """Forget a request or one of its choices: nothing more is delivered for it."""
        outbox = self._outboxes.get(self._owners.get(request_id, ""))
        if outbox is None:
            return
        for index in list(outbox.open_choices[request_id]) if choice is None else [choice]:
            outbox.pending.pop((request_id, index), None)
            self._close_choice(outbox, request_id, index)

    def publish(self, deltas: Sequence[TokenDelta]) -> None:
        """Put one step's deltas into their outboxes. Those of forgotten choices are dropped."""
        for delta in deltas:
            outbox = self._outboxes.get(self._owners.get(delta.request_id, ""))
            if outbox is None or delta.choice not in outbox.open_choices[delta.request_id]:
                continue
            key = (delta.request_id, delta.choice)
            waiting = outbox.pending.get(key)
            outbox.pending[key] = delta if waiting is None else merge(waiting, delta)
            outbox.changed.set()
            if delta.finish_reason is not None:
                self._close_choice(outbox, delta.request_id, delta.choice)

    def expire(self) -> list[str]:
        """Abort the requests of subscribers whose lease ran out; their ids. Call it several times a heartbeat.

        A longer gap is a stall of this process. Renewals that came meanwhile are still to be read, so that the
        time does not count against any lease.
        """
        now = self._clock()
        gap = now - self._looked_at
        self._looked_at = now
        if gap > HEARTBEAT_S:
            for outbox in self._outboxes.values():
                outbox.expires_at += gap
        gone = [name for name, outbox in self._outboxes.items() if outbox.expires_at < now]
        for name in gone:
            outbox = self._outboxes.pop(name)
            outbox.stream += 1
            outbox.changed.set()
            for request_id in outbox.open_choices:
                self._owners.pop(request_id, None)
                self._abort(request_id)
        return gone

    def close(self, error: str) -> None:
        """End every stream once what is pending has been taken. Idempotent; the first reason stays."""
        if self._closed is None:
            self._closed = Closed(error)
        for outbox in self._outboxes.values():
            outbox.changed.set()

    def _close_choice(self, outbox: _Outbox, request_id: str, choice: int) -> None:
        still_open = outbox.open_choices[request_id]
        still_open.discard(choice)
        if not still_open:
            del outbox.open_choices[request_id]
            del self._owners[request_id]


def merge(earlier: TokenDelta, later: TokenDelta) -> TokenDelta:
    """One delta that says what two consecutive deltas of a choice say."""
    return replace(
        later,
        token_ids=earlier.token_ids + later.token_ids,
        logprobs=earlier.logprobs + later.logprobs,
        prompt_logprobs=later.prompt_logprobs if earlier.prompt_logprobs is None else earlier.prompt_logprobs,
        num_cached_tokens=earlier.num_cached_tokens + later.num_cached_tokens,
    )
