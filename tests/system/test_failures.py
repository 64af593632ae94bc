"""Driver and ingress are killed; clients get a clear answer, and the service comes back."""

import threading
import time
from collections.abc import Iterator

import httpx
import pytest
from ray.util.placement_group import placement_group_table

from cluster.driver.placement import reserve
from cluster.errors import GenerationFailed, StartupFailed, Unavailable
from cluster.generation import FinishReason, SamplingParams
from tests.system.conftest import MODEL, NUM_CPUS, Served, counted
from tests.system.processes import all_of, kill, only, wait_until

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]  # the first one starts Ray

DRIVER = "ray::ServeReplica:shardserve:Driver"
INGRESS = "ray::ServeReplica:shardserve:Ingress"
RANK = "ray::WorkerActor"
LONG = {"model": MODEL, "prompt": "abc", "max_tokens": 3500, "stream": True}


class OpenStream:
    """A stream that is read in a thread, to see how it ends when something is killed."""

    def __init__(self, served: Served) -> None:
        self.lines: list[str] = []
        self.ended_after = 0.0
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(served.url,), daemon=True)
        self._thread.start()
        assert self._started.wait(30)

    def _read(self, url: str) -> None:
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG, timeout=60) as response:
            for line in self._lines_of(response):
                if line.startswith("data: "):
                    self.lines.append(line)
                    self._started.set()

    def _lines_of(self, response: httpx.Response) -> Iterator[str]:
        try:
            yield from response.iter_lines()
        except httpx.HTTPError as error:
            self.lines.append(f"cut: {error!r}")

    def end(self) -> str:
        """The last line, once the stream has ended."""
        killed_at = time.monotonic()
        self._thread.join(30)
        assert not self._thread.is_alive(), "the stream never ended"
        self.ended_after = time.monotonic() - killed_at
        return self.lines[-1]


def answers_again(served: Served) -> None:
    served.wait_healthy()
    assert served.client.generate("abc", SamplingParams(max_tokens=5)).text == counted("c", 5)
    body = {"model": MODEL, "prompt": "abc", "max_tokens": 5}
    response = httpx.post(f"{served.url}/v1/completions", json=body, timeout=30)
    assert response.json()["choices"][0]["text"] == counted("c", 5)


def test_a_killed_driver_is_a_clear_error_and_is_replaced(served: Served) -> None:
    stream = OpenStream(served)
    ranks = all_of(RANK)

    kill(only(DRIVER))
    last = stream.end()

    assert '"error"' in last, last
    assert '"message"' in last
    refused = httpx.post(f"{served.url}/v1/completions", json={**LONG, "stream": False}, timeout=30)
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    wait_until(lambda: not set(ranks) & set(all_of(RANK)), "its ranks are gone")
    answers_again(served)


def test_a_killed_ingress_is_a_clear_error_and_frees_its_requests(served: Served) -> None:
    aborted = served.stats().finished[FinishReason.ABORT]
    stream = OpenStream(served)
    answers: list[httpx.Response] = []
    body = {**LONG, "stream": False}
    plain = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{served.url}/v1/completions", json=body, timeout=60)),
        daemon=True,
    )
    plain.start()
    wait_until(lambda: served.stats().running == 2, "both run")

    kill(only(INGRESS))
    last = stream.end()
    plain.join(30)

    assert "service_unavailable" in last, last
    (answer,) = answers
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "service_unavailable")
    assert int(answer.headers["retry-after"]) >= 1
    wait_until(lambda: served.stats().finished[FinishReason.ABORT] == aborted + 2, "the lease has run out")
    assert served.stats().free_blocks == served.stats().total_blocks
    answers_again(served)


def test_open_client_streams_get_our_own_error(served: Served) -> None:
    deltas = served.client.stream("abc", SamplingParams(max_tokens=3500))
    next(deltas)

    kill(only(DRIVER))

    with pytest.raises((Unavailable, GenerationFailed)):
        list(deltas)
    answers_again(served)


def test_a_placement_that_cannot_be_had_ends_by_its_deadline(served: Served) -> None:
    before = {name for name, group in placement_group_table().items() if group["state"] != "REMOVED"}

    with pytest.raises(
        StartupFailed, match=rf"within 1 s: 2 bundles of 64 CPU wanted; node .* has {NUM_CPUS} CPU"
    ):
        reserve([{"CPU": 64}] * 2, deadline_s=1)

    after = {name for name, group in placement_group_table().items() if group["state"] != "REMOVED"}
    assert after == before
