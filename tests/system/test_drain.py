"""Replicas are taken away and replaced while they are in use: no stream is cut, newcomers are served or told.

A second application beside the shared one: two replicas of one rank each.
"""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from cluster.client import Client
from cluster.engine.stats import EngineStats
from tests.system.conftest import Served, counted
from tests.system.processes import wait_until

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]  # the first one starts Ray

APPLICATION = "rolling"
STREAMS = 50
TOKENS = 200
START_S = 240.0
SHARED_S = 60.0  # until both ingresses know both drivers


@pytest.fixture(scope="module")
def rolling(application: Served, counter_path: Any) -> Iterator[Served]:
    from ray import serve

    from cluster.application import DRIVER

    _deploy(counter_path, max_num_seqs=64)
    try:
        driver = serve.get_deployment_handle(DRIVER, APPLICATION)
        yield Served(f"{application.url}/{APPLICATION}", Client.connect(APPLICATION), driver)
    finally:
        if APPLICATION in serve.status().applications:
            serve.delete(APPLICATION)


def _deploy(path: Any, *, max_num_seqs: int) -> None:
    from ray import serve

    from cluster.application import build

    settings = {
        "model": str(path),
        "replicas": 2,
        "device": "cpu",
        "kv_cache_memory": "32MiB",
        "max_num_seqs": max_num_seqs,
        "drain_deadline_s": 240,
    }
    serve.run(build(settings), name=APPLICATION, route_prefix=f"/{APPLICATION}")


class Stream:
    """One long answer, read in a thread of its own."""

    def __init__(self, url: str, start: str, tokens: int = TOKENS) -> None:
        self.start, self.tokens = start, tokens
        self.text = ""
        self.end = "it never ended"
        self.has_begun = threading.Event()
        self._url = url
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        body = {"model": "counter", "prompt": self.start, "max_tokens": self.tokens, "stream": True}
        try:
            with httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=START_S) as response:
                for line in response.iter_lines():
                    self._take(line)
        except httpx.HTTPError as error:
            self.end = repr(error)

    def _take(self, line: str) -> None:
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                self.end = str(event["error"])
                return
            self.text += event["choices"][0]["text"]
            self.has_begun.set()
        elif line:
            self.end = line

    def check(self) -> None:
        self._thread.join(START_S)
        assert self.end == "data: [DONE]"
        assert self.text == counted(self.start, self.tokens)


def begun(url: str, count: int, tokens: int = TOKENS) -> list[Stream]:
    streams = [Stream(url, chr(40 + i), tokens) for i in range(count)]
    for stream in streams:
        assert stream.has_begun.wait(START_S), stream.end
    return streams


class Newcomers:
    """Short requests one after the other, and what became of them."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.statuses: list[int] = []
        self.mistakes: list[str] = []

    def __enter__(self) -> "Newcomers":
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._closing.set()
        self._thread.join(START_S)

    def _run(self) -> None:
        body = {"model": "counter", "prompt": "a", "max_tokens": 5}
        while not self._closing.wait(0.2):
            response = httpx.post(f"{self._url}/v1/completions", json=body, timeout=START_S)
            self.statuses.append(response.status_code)
            if response.status_code == 200:
                if response.json()["choices"][0]["text"] != counted("a", 5):
                    self.mistakes.append(response.text)
            elif response.status_code != 503 or int(response.headers.get("retry-after", 0)) < 1:
                self.mistakes.append(f"{response.status_code}: {response.text}")


def stats_of_all(served: Served) -> list[EngineStats]:
    answers = served.driver.broadcast("stats").results(timeout_s=30)
    return list(answers)


def received_by_driver(served: Served) -> dict[str, int]:
    """As one of the ingresses knows it, so of the drivers that it has found."""
    scraped = httpx.get(f"{served.url}/metrics", timeout=START_S).text
    found = re.findall(r'^shardserve_requests_received_total\{.*driver="(\w+)".*\} (\d+)', scraped, re.MULTILINE)
    return {driver: int(received) for driver, received in found}


def test_two_replicas_share_the_requests(rolling: Served, say: Callable[[str], None]) -> None:
    """An ingress is ready with the first driver and finds the second soon; from then on each has its part."""
    rounds: list[list[int]] = []
    deadline = time.monotonic() + SHARED_S
    while not rounds or len(rounds[-1]) < 2 or min(rounds[-1]) < 2:
        assert time.monotonic() < deadline, rounds
        before = received_by_driver(rolling)
        for stream in begun(rolling.url, 6, 100):
            stream.check()
        after = received_by_driver(rolling)
        rounds.append([after[driver] - before[driver] for driver in after if driver in before])
    say(f"of six requests at once each replica got, round after round: {rounds}")


def test_one_request_may_ask_both_replicas_at_once(rolling: Served) -> None:
    starts = [chr(40 + i) for i in range(12)]
    body = {"model": "counter", "prompt": starts, "max_tokens": 20}
    answer = httpx.post(f"{rolling.url}/v1/completions", json=body, timeout=START_S)
    assert [choice["text"] for choice in answer.json()["choices"]] == [counted(start, 20) for start in starts]
    assert len(received_by_driver(rolling)) == 2


def test_a_redeployment_cuts_no_stream(rolling: Served, counter_path: Any, say: Callable[[str], None]) -> None:
    streams = begun(rolling.url, STREAMS)
    began = time.monotonic()
    with Newcomers(rolling.url) as newcomers:
        _deploy(counter_path, max_num_seqs=65)
        took_s = time.monotonic() - began
        for stream in streams:
            stream.check()
    assert newcomers.mistakes == []
    served = newcomers.statuses.count(200)
    say(f"{STREAMS} streams across a redeployment of {took_s:.0f} s: none cut; newcomers: {newcomers.statuses}")
    assert served >= len(newcomers.statuses) / 2
    wait_until(lambda: len(stats_of_all(rolling)) == 2, "both are there again")


def test_a_deletion_lets_streams_finish(rolling: Served) -> None:
    from ray import serve

    streams = begun(rolling.url, 8)
    serve.delete(APPLICATION, _blocking=False)
    for stream in streams:
        stream.check()
    wait_until(lambda: APPLICATION not in serve.status().applications, "it is gone")
