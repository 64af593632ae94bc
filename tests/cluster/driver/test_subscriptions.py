"""Outboxes, leases and streams of a driver, with a clock of our own."""

import asyncio

import pytest

from cluster.driver.delta_codec import Closed, Deltas, DriverMessage, Hello
from cluster.driver.subscriptions import Subscriptions, merge
from cluster.errors import Unavailable
from cluster.generation import FinishReason, TokenDelta, TokenLogprob


class Rig:
    """Subscriptions with a hand-set clock and a record of aborts."""

    def __init__(self) -> None:
        self.now = 0.0
        self.aborted: list[str] = []
        self.subscriptions = Subscriptions(self.aborted.append, lambda: self.now, lease_s=3.0)

    def watch_until(self, time_s: float) -> list[str]:
        """Look ten times a second, as the driver does; who was found gone."""
        gone: list[str] = []
        while self.now < time_s:
            self.now = min(time_s, self.now + 0.1)
            gone += self.subscriptions.expire()
        return gone


@pytest.fixture
def rig() -> Rig:
    return Rig()


async def opened(rig: Rig, subscriber: str = "ingress") -> "asyncio.Queue[DriverMessage]":
    """A stream that is read into a queue until it ends."""
    messages: asyncio.Queue[DriverMessage] = asyncio.Queue()

    async def read() -> None:
        async for message in rig.subscriptions.stream(subscriber):
            messages.put_nowait(message)

    messages.task = asyncio.create_task(read())  # type: ignore[attr-defined]
    assert isinstance(await messages.get(), Hello)
    return messages


def token(request: str, value: int, choice: int = 0, finish: FinishReason | None = None) -> TokenDelta:
    return TokenDelta(request, choice, (value,), finish)


async def test_a_step_is_one_message_for_each_subscriber(rig: Rig) -> None:
    mine, other = await opened(rig), await opened(rig, "other")
    for request in ("a", "b"):
        rig.subscriptions.own("ingress", request, 1)
    rig.subscriptions.own("other", "c", 1)

    rig.subscriptions.publish([token("a", 1), token("b", 2), token("c", 3)])

    assert await mine.get() == Deltas((token("a", 1), token("b", 2)))
    assert await other.get() == Deltas((token("c", 3),))


async def test_a_slow_reader_gets_one_merged_delta_a_choice(rig: Rig) -> None:
    mine = await opened(rig)
    rig.subscriptions.own("ingress", "a", 2)

    for value in range(3):
        rig.subscriptions.publish([token("a", value), token("a", 10 + value, choice=1)])
    rig.subscriptions.publish([token("a", 3, finish=FinishReason.LENGTH)])

    assert await mine.get() == Deltas(
        (TokenDelta("a", 0, (0, 1, 2, 3), FinishReason.LENGTH), TokenDelta("a", 1, (10, 11, 12)))
    )


def test_a_merged_delta_says_all_that_its_parts_said() -> None:
    one, two = TokenLogprob(1, -0.5, ()), TokenLogprob(2, -1.5, ((1, -0.25),))
    prompt = (None, one)
    parts = (
        TokenDelta("a", 0, (), prompt_logprobs=prompt, num_cached_tokens=16),
        TokenDelta("a", 0, (1,), logprobs=(one,)),
        TokenDelta("a", 0, (2,), FinishReason.STOP, logprobs=(two,)),
    )
    whole = TokenDelta("a", 0, (1, 2), FinishReason.STOP, None, (one, two), prompt, 16)
    assert merge(merge(*parts[:2]), parts[2]) == whole
    assert merge(parts[0], merge(*parts[1:])) == whole


async def test_a_request_is_forgotten_when_its_last_choice_ends(rig: Rig) -> None:
    await opened(rig)
    rig.subscriptions.own("ingress", "a", 2)

    rig.subscriptions.publish([token("a", 1, finish=FinishReason.STOP)])
    assert rig.subscriptions.num_requests == 1
    rig.subscriptions.publish([token("a", 1, choice=1, finish=FinishReason.STOP)])
    assert rig.subscriptions.num_requests == 0


async def test_an_aborted_choice_is_delivered_nothing_more(rig: Rig) -> None:
    mine = await opened(rig)
    rig.subscriptions.own("ingress", "a", 2)
    rig.subscriptions.publish([token("a", 1), token("a", 2, choice=1)])

    rig.subscriptions.disown("a", 0)
    rig.subscriptions.publish([token("a", 3), token("a", 4, choice=1)])

    assert await mine.get() == Deltas((TokenDelta("a", 1, (2, 4)),))


async def test_a_lease_that_runs_out_aborts_its_requests_and_no_others(rig: Rig) -> None:
    gone = await opened(rig, "gone")
    await opened(rig, "alive")
    rig.subscriptions.own("gone", "a", 1)
    rig.subscriptions.own("alive", "b", 1)

    assert rig.watch_until(2.9) == []
    assert rig.subscriptions.renew("alive")
    assert rig.watch_until(3.1) == ["gone"]

    assert rig.aborted == ["a"]
    assert rig.subscriptions.num_requests == 1
    assert not rig.subscriptions.renew("gone")
    await asyncio.wait_for(gone.task, 60)  # type: ignore[attr-defined]


async def test_a_stall_of_the_driver_is_nobodys_silence(rig: Rig) -> None:
    """Renewals that were sent meanwhile are read after the first look."""
    await opened(rig, "alive")
    await opened(rig, "gone")
    assert rig.watch_until(1.0) == []

    rig.now = 60.0  # nothing ran
    assert rig.subscriptions.expire() == []
    assert rig.subscriptions.renew("alive")

    assert rig.watch_until(61.8) == []
    assert rig.watch_until(62.2) == ["gone"]  # it had 2 s left before the stall
    assert rig.subscriptions.renew("alive")


async def test_a_lost_line_cuts_the_lease_short_unless_it_is_renewed(rig: Rig) -> None:
    for name in ("dead", "back"):
        await opened(rig, name)
        rig.subscriptions.own(name, f"of {name}", 1)
        rig.subscriptions.line_lost(name)
    rig.subscriptions.line_lost("unknown")
    assert rig.watch_until(1.9) == []
    rig.subscriptions.renew("back")
    assert rig.watch_until(4.5) == ["dead"]
    assert rig.aborted == ["of dead"]


async def test_no_request_without_a_lease(rig: Rig) -> None:
    with pytest.raises(Unavailable, match="does not know this ingress"):
        rig.subscriptions.own("stranger", "a", 1)


async def test_a_second_stream_takes_over_with_the_same_lease(rig: Rig) -> None:
    first = rig.subscriptions.stream("ingress")
    hello = await anext(first)
    rig.subscriptions.own("ingress", "a", 1)
    second = rig.subscriptions.stream("ingress")
    assert await anext(second) == hello

    rig.subscriptions.publish([token("a", 1)])

    with pytest.raises(StopAsyncIteration):
        await anext(first)
    assert await anext(second) == Deltas((token("a", 1),))


async def test_deltas_wait_between_two_streams(rig: Rig) -> None:
    first = rig.subscriptions.stream("ingress")
    await anext(first)
    rig.subscriptions.own("ingress", "a", 1)
    await first.aclose()  # type: ignore[attr-defined]

    rig.subscriptions.publish([token("a", 1)])

    second = rig.subscriptions.stream("ingress")
    await anext(second)
    assert await anext(second) == Deltas((token("a", 1),))


async def test_closing_delivers_what_is_pending_and_then_the_reason(rig: Rig) -> None:
    mine = await opened(rig)
    rig.subscriptions.own("ingress", "a", 1)
    rig.subscriptions.publish([TokenDelta("a", 0, (), FinishReason.ERROR, "rank 1 died")])

    rig.subscriptions.close("rank 1 died")
    rig.subscriptions.close("a later reason")

    assert await mine.get() == Deltas((TokenDelta("a", 0, (), FinishReason.ERROR, "rank 1 died"),))
    assert await mine.get() == Closed("rank 1 died")
    with pytest.raises(Unavailable):
        rig.subscriptions.own("ingress", "b", 1)


async def test_idle_is_who_has_no_request_and_nothing_to_send(rig: Rig) -> None:
    def is_idle() -> bool:
        return rig.subscriptions.is_idle

    stream = rig.subscriptions.stream("ingress")
    await anext(stream)
    assert is_idle()
    rig.subscriptions.own("ingress", "a", 1)
    assert not is_idle()
    rig.subscriptions.publish([token("a", 1, finish=FinishReason.STOP)])
    assert not is_idle()
    assert await anext(stream) == Deltas((token("a", 1, finish=FinishReason.STOP),))
    assert is_idle()
