"""Ranks are killed and stopped under load: every client gets the undisturbed answer, in one response."""

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import pytest

from cluster.generation import SamplingParams
from tests.system.conftest import MODEL, Served, counted, health
from tests.system.processes import all_of, kill, title, wait_until

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]  # the first one starts Ray

RANK = "ray::WorkerActor.run"  # one that runs, wherever it comes from
NEW_RANK = "ray::WorkerActor"  # the same, and one that only starts
SPARE = "ray::SpareActor"
TOKENS = 500
ANSWER = counted("c", TOKENS)


class Clients:
    """Four of them at once: streaming, with two choices, not streaming, and from Python."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self.answers: dict[str, list[str]] = {}
        self.num_streamed = 0
        self._threads = [
            threading.Thread(target=self._ask, args=item, daemon=True)
            for item in [
                ("stream", lambda: self._stream(1)),
                ("two choices", lambda: self._stream(2)),
                ("plain", self._plain),
                ("python", self._python),
            ]
        ]
        for thread in self._threads:
            thread.start()

    def wait_for_tokens(self) -> None:
        """Until all streams are well under way."""
        wait_until(lambda: self.num_streamed >= 200, "the streams have begun")

    def end(self) -> dict[str, list[str]]:
        for thread in self._threads:
            thread.join(120)
        return self.answers

    def _ask(self, name: str, how: Callable[[], list[str]]) -> None:
        try:
            self.answers[name] = how()
        except Exception as error:
            self.answers[name] = [repr(error)]

    def _stream(self, n: int) -> list[str]:
        body = {"model": MODEL, "prompt": "abc", "max_tokens": TOKENS, "stream": True, "n": n, "seed": 7}
        texts = [""] * n
        with httpx.stream("POST", f"{self._served.url}/v1/completions", json=body, timeout=120) as response:
            assert response.status_code == 200
            lines = [line.removeprefix("data: ") for line in self._lines(response)]
        assert lines[-1] == "[DONE]"
        for line in lines[:-1]:
            for choice in json.loads(line)["choices"]:
                texts[choice["index"]] += choice["text"]
        return texts

    def _lines(self, response: httpx.Response) -> Iterator[str]:
        for line in response.iter_lines():
            if line:
                self.num_streamed += 1
                yield line

    def _plain(self) -> list[str]:
        body = {"model": MODEL, "prompt": "abc", "max_tokens": TOKENS}
        response = httpx.post(f"{self._served.url}/v1/completions", json=body, timeout=120)
        return [response.json()["choices"][0]["text"]]

    def _python(self) -> list[str]:
        deltas = self._served.client.stream("abc", SamplingParams(max_tokens=TOKENS, temperature=1, seed=3))
        return ["".join(delta.text for delta in deltas)]


UNDISTURBED = {"stream": [ANSWER], "two choices": [ANSWER] * 2, "plain": [ANSWER], "python": [ANSWER]}


@contextmanager
def disturbed(served: Served) -> Iterator[list[int]]:
    """Kill within this block, with four clients being answered: the pids of the ranks in order of start."""
    recoveries = served.stats().recoveries
    clients = Clients(served)
    clients.wait_for_tokens()
    ranks = all_of(RANK)
    assert len(ranks) == 2
    yield ranks
    assert clients.end() == UNDISTURBED
    served.wait_healthy()
    stats = served.stats()
    assert stats.recoveries > recoveries
    assert stats.free_blocks == stats.total_blocks
    assert stats.received == sum(stats.finished.values())
    assert len(all_of(RANK)) == 2


def ready_spare() -> int:
    """The process that waits for a seat, once it has imported everything."""
    wait_until(lambda: [title(pid) for pid in all_of(SPARE)] == [SPARE], "a spare is ready")
    return all_of(SPARE)[0]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_spare_takes_the_seat_of_a_killed_rank(served: Served, rank: int) -> None:
    spare = ready_spare()
    with disturbed(served) as ranks:
        kill(ranks[rank])
    assert set(all_of(RANK)) == {ranks[1 - rank], spare}, "the other keeps its process and its weights"
    assert ready_spare() != spare


def test_both_ranks_are_killed_at_once(served: Served) -> None:
    spare = ready_spare()
    with disturbed(served) as ranks:
        for pid in ranks:
            kill(pid)
    assert not set(ranks) & set(all_of(RANK))
    assert spare in all_of(RANK)


def test_a_dead_spare_disturbs_nobody_and_the_next_rank_is_killed_while_it_starts(served: Served) -> None:
    with disturbed(served) as ranks:
        for pid in all_of(SPARE):
            kill(pid)
        kill(ranks[1])
        wait_until(lambda: bool(set(all_of(NEW_RANK)) - set(ranks)), "a new one has come")
        kill((set(all_of(NEW_RANK)) - set(ranks)).pop())


def test_a_rank_that_hangs_is_replaced_by_the_step_deadline(served: Served) -> None:
    with disturbed(served) as ranks:
        os.kill(ranks[0], signal.SIGSTOP)
        wait_until(lambda: "have not answered a step" in health(served.url), "health is off before the deadline")
    assert ranks[0] not in all_of(RANK), "a stopped process must not be left behind"
    assert ranks[1] in all_of(RANK), "who left its loop when told did not hang"
    with pytest.raises(ProcessLookupError):
        os.kill(ranks[0], signal.SIGCONT)  # nothing is left that could come back and answer


def test_a_rank_that_goes_on_before_the_step_deadline_changes_nothing(served: Served) -> None:
    recoveries = served.stats().recoveries
    clients = Clients(served)
    clients.wait_for_tokens()
    ranks = all_of(RANK)

    os.kill(ranks[1], signal.SIGSTOP)
    wait_until(lambda: "have not answered a step" in health(served.url), "health is off meanwhile")
    os.kill(ranks[1], signal.SIGCONT)

    assert clients.end() == UNDISTURBED
    served.wait_healthy()
    assert (served.stats().recoveries, all_of(RANK)) == (recoveries, ranks)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_dies_or_hangs_while_idle(served: Served, end: signal.Signals) -> None:
    recoveries = served.stats().recoveries
    for pid in all_of(SPARE):  # so that the ranks are away for longer than a look at the health takes
        kill(pid)

    os.kill(all_of(RANK)[0], end)
    wait_until(lambda: not served.is_healthy(), "health is off", deadline_s=10)
    wait_until(lambda: served.stats().recoveries == recoveries + 1, "the ranks are back")

    served.wait_healthy()
    assert served.client.generate("abc", SamplingParams(max_tokens=5)).text == counted("c", 5)
