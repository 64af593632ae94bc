"""Everything is killed, stopped and paused at random under load, and what clients got and what is left is judged.

    scripts/test tests/system/test_chaos.py                         the short form, as in scripts/test
    scripts/test tests/system/test_chaos.py --kills 200 --seed 7    the long one; the seed replays what is done

What a blow hits and when follows from the seed; what runs at that moment does not.
"""

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

import httpx
import pytest

from tests.fakes.scrapes import Scraped
from tests.system.conftest import Served
from tests.system.inventory import Inventory
from tests.system.load import Load, Outcome, Verdict
from tests.system.processes import all_of, kill, wait_until

pytestmark = pytest.mark.system  # its timeout grows with --kills: see conftest.py

DRIVER = "ray::ServeReplica:shardserve:Driver"
INGRESS = "ray::ServeReplica:shardserve:Ingress"
CONTROLLER = "ray::ServeController"
RANKS = 2
_BACK_S = 240.0  # for a token to be made again: a guard against hanging, Serve promises no time
_SETTLED_S = 30.0  # for everything to be given back
_AFTERMATH_S = 4.0  # after health is back: an error may still be on its way, and a lease runs out
_PAUSE_S = 4.0  # much longer than a heartbeat may be late, and shorter than any lease
_LOOK_S = 0.5  # between looks at the counters
_MOST_SHOWN = 20

Say = Callable[[str], None]


class Blow(Enum):
    """What is done."""

    RANK = "SIGKILL to a rank"
    BOTH = "SIGKILL to both ranks"
    AGAIN = "SIGKILL to a rank, and to the next one that comes"
    STOP = "SIGSTOP to a rank"
    PAUSE_DRIVER = "SIGSTOP to the driver, SIGCONT after a moment"
    PAUSE_INGRESS = "SIGSTOP to the ingress, SIGCONT after a moment"
    CONTROLLER = "SIGKILL to Serve's controller"
    DRIVER = "SIGKILL to the driver"
    INGRESS = "SIGKILL to the ingress"
    HANG_DRIVER = "SIGSTOP to the driver"
    HANG_INGRESS = "SIGSTOP to the ingress"

    @property
    def replaces(self) -> str | None:
        """The title of the process that Serve, or Ray, starts anew; None for what we mend ourselves."""
        match self:
            case Blow.DRIVER | Blow.HANG_DRIVER:
                return DRIVER
            case Blow.INGRESS | Blow.HANG_INGRESS:
                return INGRESS
            case Blow.CONTROLLER:
                return CONTROLLER
            case _:
                return None

    @property
    def is_hard(self) -> bool:
        """Whether open requests may end with a clear error."""
        return self.replaces in (DRIVER, INGRESS)


RARE = (Blow.HANG_DRIVER, Blow.HANG_INGRESS)  # half a minute each, until Serve's probes have failed
OFTEN = tuple(blow for blow in Blow if blow not in RARE)


@dataclass(frozen=True, slots=True)
class Struck:
    """One blow, from the moment it fell until its aftermath was over."""

    blow: Blow
    began: float
    ended: float


def blows(seed: int, count: int) -> Iterator[tuple[Blow, int, float]]:
    """Kind, rank and seconds of peace before it. Every kind comes once a round, in an order of its own; the rare
    ones in every fourth.
    """
    chance = random.Random(seed)
    deck: list[Blow] = []
    rounds = 0
    for _ in range(count):
        if not deck:
            rounds += 1
            deck = [*OFTEN, *(RARE if rounds % 4 == 0 else ())]
            chance.shuffle(deck)
        yield deck.pop(), chance.randrange(RANKS), chance.uniform(0.2, 2.5)


def ranks() -> list[int]:
    return all_of("ray::WorkerActor")


class Chaos:
    """Strikes, and waits until tokens are made again."""

    def __init__(self, served: Served) -> None:
        self._served = served

    def strike(self, blow: Blow, rank: int) -> Struck:
        began = time.monotonic()
        recoveries = self._served.stats().recoveries
        title = blow.replaces
        if title is not None:
            (victim,) = all_of(title)
            os.kill(victim, signal.SIGSTOP if blow in RARE else signal.SIGKILL)
            wait_until(lambda: victim not in all_of(title), f"it has gone after {blow.value}", _BACK_S)
        elif blow in (Blow.PAUSE_DRIVER, Blow.PAUSE_INGRESS):
            _pause(*all_of(DRIVER if blow is Blow.PAUSE_DRIVER else INGRESS))
        else:
            _strike_ranks(blow, ranks(), rank)
            wait_until(lambda: self._served.stats().recoveries > recoveries, "the ranks are back", _BACK_S)
        wait_until(self._is_well, f"all is well after {blow.value}", _BACK_S)
        return Struck(blow, began, time.monotonic() + _AFTERMATH_S)

    def _is_well(self) -> bool:
        """Healthy, with all processes there: a blow against what is missing would be none."""
        there = [len(all_of(title)) for title in (DRIVER, INGRESS, CONTROLLER)]
        return self._served.is_healthy() and there == [1, 1, 1] and len(ranks()) == RANKS


def _strike_ranks(blow: Blow, pids: list[int], rank: int) -> None:
    match blow:
        case Blow.BOTH:
            for pid in pids:
                kill(pid)
        case Blow.STOP:
            os.kill(pids[rank], signal.SIGSTOP)
        case Blow.AGAIN:
            kill(pids[rank])
            wait_until(lambda: bool(set(ranks()) - set(pids)), "another rank has come", _BACK_S)
            kill((set(ranks()) - set(pids)).pop())
        case _:
            kill(pids[rank])


def _pause(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    time.sleep(_PAUSE_S)
    os.kill(pid, signal.SIGCONT)


class Books:
    """Scrapes /metrics all the time: what came in is somewhere, at every look."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.num_looks = 0
        self.mistakes: list[str] = []

    def __enter__(self) -> "Books":
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._closing.set()
        self._thread.join(60)

    def _run(self) -> None:
        while not self._closing.wait(_LOOK_S):
            try:
                response = httpx.get(f"{self._served.url}/metrics", timeout=30)
            except httpx.HTTPError:  # there is no ingress just now
                continue
            if response.status_code != 200 or "requests_received" not in response.text:
                continue
            self.num_looks += 1
            try:
                Scraped.of(response.text).check_conservation()
            except AssertionError as error:
                self.mistakes.append(str(error))


def unexcused(outcomes: list[Outcome], struck: list[Struck]) -> list[Outcome]:
    """Outcomes that no blow explains: wrong ones always, refusals and failures outside of hard ones."""
    hard = [(one.began, one.ended) for one in struck if one.blow.is_hard]
    return [
        outcome
        for outcome in outcomes
        if outcome.verdict is Verdict.WRONG
        or (
            outcome.verdict is not Verdict.EXACT
            and not any(outcome.began < ended and outcome.ended > began for began, ended in hard)
        )
    ]


def test_chaos(served: Served, request: pytest.FixtureRequest, say: Say) -> None:
    count, seed = request.config.getoption("--kills"), request.config.getoption("--seed")
    say(f"chaos: {count} blows, replayed by --kills {count} --seed {seed}")
    served.client.generate("warm", None)
    before = Inventory.take(served.stats().free_blocks)
    struck: list[Struck] = []
    with Books(served) as books, Load(served, seed) as load:
        chaos = Chaos(served)
        for number, (blow, rank, peace_s) in enumerate(blows(seed, count), start=1):
            time.sleep(peace_s)
            struck.append(chaos.strike(blow, rank))
            outage_s = struck[-1].ended - struck[-1].began - _AFTERMATH_S
            say(f"{number:>4}/{count} {blow.value:<55} {outage_s:5.1f} s  {dict(load.counts())}")
            assert not unexcused(load.outcomes, struck), unexcused(load.outcomes, struck)[:_MOST_SHOWN]
        time.sleep(_AFTERMATH_S)

    _show(load.outcomes, struck, books, say)
    assert not unexcused(load.outcomes, struck), unexcused(load.outcomes, struck)[:_MOST_SHOWN]
    assert not books.mistakes, books.mistakes[:_MOST_SHOWN]
    assert books.num_looks
    assert load.counts()[Verdict.EXACT.value] > count
    _check_that_nothing_is_left(served, before, say)


def _show(outcomes: list[Outcome], struck: list[Struck], books: Books, say: Say) -> None:
    hit = [o for o in outcomes if any(o.began < one.began < o.ended for one in struck)]
    lost = unexcused(outcomes, struck)
    say(f"requests: {len(outcomes)} in all, {len(hit)} in flight when a blow fell, {len(lost)} lost")
    say(f"  of those in flight: {dict(Counter(outcome.verdict.value for outcome in hit))}")
    say(f"  blows: {dict(Counter(one.blow.name for one in struck))}; looks at the counters: {books.num_looks}")


def _check_that_nothing_is_left(served: Served, before: Inventory, say: Say) -> None:
    deadline = time.monotonic() + _SETTLED_S
    while True:
        stats = served.stats()
        now = Inventory.take(stats.free_blocks)
        leaks = now.leaks_since(before)
        if stats.running or stats.waiting:
            leaks.append(f"{stats.running} running, {stats.waiting} waiting")
        if not leaks or time.monotonic() > deadline:
            break
        time.sleep(1)
    say("left over, before and after:")
    for row in now.table_since(before):
        say(f"  {row}")
    assert not leaks, "\n".join(leaks)


def test_the_seed_says_what_is_done() -> None:
    assert list(blows(7, 30)) == list(blows(7, 30))
    assert list(blows(7, 30)) != list(blows(8, 30))
    assert Counter(blow for blow, _, _ in blows(7, 2 * len(OFTEN))) == dict.fromkeys(OFTEN, 2)
    assert set(RARE) < {blow for blow, _, _ in blows(7, 4 * len(Blow))}
