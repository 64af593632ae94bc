"""Ranks on another node than their driver's: how they end is told from there, and a hung one is ended there."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.system.conftest import counted, free_port
from tests.system.hosted_cluster import Wanted, hosted
from tests.system.processes import descendants, kill, parent_of, wait_until

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

DRIVER = "ray::ServeReplica:shardserve:Driver"
RANK = "ray::WorkerActor"
GUARD = "ray::GuardActor"


@pytest.fixture(scope="module")
def url(counter_path: Path) -> Iterator[str]:
    """Two nodes with a rank each."""
    settings = {
        "model": str(counter_path),
        "tensor_parallel_size": 2,
        "device": "cpu",
        "kv_cache_memory": "16MiB",
        "step_deadline_s": 5,
        "drain_deadline_s": 0,
        "spare": False,
    }
    with hosted(Wanted(free_port(), [1, 1], settings)) as cluster:
        wait_until(lambda: len(all_of(GUARD)) == 1, "the guard, which starts beside the group, is there")
        yield cluster.url


def all_of(prefix: str) -> list[int]:
    """Of this cluster alone: other tests may have left one of their own running."""
    (host,) = [pid for pid, title in descendants().items() if "tests.system.hosted_cluster" in title]
    return [pid for pid, title in descendants(host).items() if title.startswith(prefix)]


def far_rank() -> int:
    """The one that another raylet has started than the driver's."""
    (driver,) = all_of(DRIVER)
    (far,) = [pid for pid in all_of(RANK) if parent_of(pid) != parent_of(driver)]
    return far


def health(url: str) -> httpx.Response:
    return httpx.get(f"{url}/health", timeout=10)


def wait_well(url: str, gone: int) -> None:
    def is_well() -> bool:
        return health(url).status_code == 200 and len(all_of(RANK)) == 2 and gone not in all_of(RANK)

    wait_until(is_well, "the group is back")
    body = {"model": "counter", "prompt": "abc", "max_tokens": 8}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.json()["choices"][0]["text"] == counted("c", 8)


def test_it_is_told_how_a_far_rank_ended_and_what_it_said(url: str) -> None:
    victim = far_rank()
    os.kill(victim, signal.SIGABRT)  # of which Python leaves a few lines
    said: list[str] = []

    def has_been_told() -> bool:
        answer = health(url)
        said.append(answer.text)
        return answer.status_code == 503 and "its last lines" in answer.text

    wait_until(has_been_told, "health tells what the rank said last", 30)
    assert re.search(rf"rank 1 \(pid {victim} on [\d.]+\) (was ended by SIGABRT|has ended)", said[-1]), said[-1]
    wait_well(url, victim)


def test_a_far_rank_that_hangs_is_ended_though_it_does_not_hear_ray(url: str) -> None:
    victim = far_rank()
    os.kill(victim, signal.SIGSTOP)
    wait_until(lambda: health(url).status_code == 503, "health is off", 30)
    wait_well(url, victim)


def test_a_lost_guard_is_replaced_with_the_next_restart_and_disturbs_nobody(url: str) -> None:
    (guard,) = all_of(GUARD)
    kill(guard)
    victim = far_rank()
    kill(victim)
    wait_until(lambda: f"pid {victim}" in health(url).text, "the death is told by Ray alone", 30)
    wait_well(url, victim)
    wait_until(lambda: len(all_of(GUARD)) == 1 and guard not in all_of(GUARD), "there is another guard", 30)
