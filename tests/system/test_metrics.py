"""GET /metrics of a real application: it adds up at every scrape, and its tokens are those that clients got."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from cluster.generation import SamplingParams
from tests.fakes.scrapes import Scraped
from tests.system.conftest import MODEL, Served
from tests.system.processes import all_of, kill, wait_until

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]  # the first one starts Ray

TOKENS = 1000  # long enough for all requests of a test to run at one time


def scrape(served: Served) -> Scraped:
    response = httpx.get(f"{served.url}/metrics", timeout=30)
    assert response.status_code == 200
    return Scraped.of(response.text)


@contextmanager
def scraped_all_the_time(served: Served) -> Iterator[None]:
    over, wrong = threading.Event(), list[BaseException]()
    before = scrape(served)

    def look() -> None:
        earlier = before
        try:
            while not over.wait(0.02):
                scraped = scrape(served)
                scraped.check_conservation()
                scraped.check_follows(earlier)
                earlier = scraped
        except (AssertionError, httpx.HTTPError) as error:
            wrong.append(error)

    scraper = threading.Thread(target=look, daemon=True)
    scraper.start()
    try:
        yield
    finally:
        over.set()
        scraper.join(60)
    assert not wrong, wrong[0]
    after = scrape(served)
    after.check_conservation()
    after.check_follows(before)


def complete(served: Served, **more: Any) -> int:
    """The completion tokens that `usage` bills."""
    body = {"model": MODEL, "prompt": "abc", "max_tokens": TOKENS, **more}
    answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=120).json()
    tokens: int = answer["usage"]["completion_tokens"]
    return tokens


def generate(served: Served) -> int:
    return served.client.generate("abc", SamplingParams(max_tokens=TOKENS)).num_completion_tokens


def at_once(*work: Callable[[], int]) -> list[int]:
    """What each gives, run at the same time."""
    results: list[int] = []
    threads = [threading.Thread(target=lambda each=each: results.append(each()), daemon=True) for each in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(results) == len(work)
    return results


def test_it_adds_up_at_every_scrape_and_tokens_are_what_clients_got(served: Served) -> None:
    """Through the death of a rank in the middle of it."""
    before = scrape(served)

    def kill_a_rank() -> int:
        wait_until(lambda: served.stats().running == 5, "all run")
        kill(all_of("ray::WorkerActor")[0])
        return 0

    with scraped_all_the_time(served):
        tokens = at_once(
            kill_a_rank,
            lambda: complete(served),
            lambda: complete(served, n=2),
            lambda: complete(served, ignore_eos=True),
            lambda: generate(served),
        )

    served.wait_healthy()
    after = scrape(served)
    gained = {
        name: after[name] - before[name]
        for name in (
            "shardserve_generation_tokens_total",
            "shardserve_completion_tokens_total",
            "shardserve_requests_received_total",
            "shardserve_recoveries_total",
            "shardserve_time_to_first_token_seconds_count",
        )
    }
    assert sum(tokens) == 5 * TOKENS
    assert list(gained.values()) == [5 * TOKENS, 5 * TOKENS, 5, 1, 4]
    assert after.finished["length"] - before.finished["length"] == 5
    assert after["shardserve_outage_seconds_total"] > before["shardserve_outage_seconds_total"]
    assert after["shardserve_available"] == 1


def test_a_stop_string_is_a_stop_and_bills_no_token_after_it(served: Served) -> None:
    before = scrape(served)
    with scraped_all_the_time(served):
        tokens = complete(served, stop="z")
        wait_until(lambda: scrape(served).finished["stop"] == before.finished["stop"] + 1, "the choice has ended")

    after = scrape(served)
    assert tokens == len("defghijklmnopqrstuvwxyz")
    assert after["shardserve_completion_tokens_total"] - before["shardserve_completion_tokens_total"] == tokens
    assert after["shardserve_generation_tokens_total"] - before["shardserve_generation_tokens_total"] >= tokens
    assert after.finished["abort"] == before.finished["abort"]


def test_a_client_that_leaves_is_an_abort(served: Served) -> None:
    before = scrape(served)
    body = {"model": MODEL, "prompt": "abc", "max_tokens": 3500, "stream": True}
    with scraped_all_the_time(served):
        with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=60) as response:
            next(response.iter_lines())
        wait_until(lambda: scrape(served).finished["abort"] == before.finished["abort"] + 1, "it is aborted")

    after = scrape(served)
    assert after.received == before.received + 1
    assert after["shardserve_requests_running"] == after["shardserve_requests_waiting"] == 0
