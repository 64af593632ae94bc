"""Ranks on other nodes than ours, and what becomes of the service when nodes, or the GCS for good, are lost.

One cluster for all: the head, which has no CPU, with the ingress, and two nodes with a rank each. How a far rank
ends is told from its node, and a hung one is ended there. The last tests take the cluster apart.
"""

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.conftest import OK, counted, free_port, health
from tests.system.hosted_cluster import HostedCluster, Wanted, answer_of, ask, hosted, settings
from tests.system.processes import descendants, kill, parent_of, wait_until
from tests.system.test_drain import begun

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

DRIVER = "ray::ServeReplica:shardserve:Driver"
RANK = "ray::WorkerActor"
GUARD = "ray::GuardActor"
WITHOUT_S = 5.0  # without a GCS


@pytest.fixture(scope="module")
def cluster(counter_path: Path) -> Iterator[HostedCluster]:
    """The GCS keeps its tables nowhere."""
    wanted = Wanted(free_port(), [0, 1, 1], settings(counter_path, spare=False), ingress_on_head=True)
    with hosted(wanted) as cluster:
        wait_until(lambda: len(all_of(GUARD)) == 1, "the guard, which starts beside the group, is there")
        yield cluster


def all_of(prefix: str) -> list[int]:
    """Of this cluster alone: other tests may have left one of their own running."""
    (host,) = [pid for pid, title in descendants().items() if "tests.system.hosted_cluster" in title]
    return [pid for pid, title in descendants(host).items() if title.startswith(prefix)]


def far_rank() -> int:
    """The one that another raylet has started than the driver's."""
    (driver,) = all_of(DRIVER)
    (far,) = [pid for pid in all_of(RANK) if parent_of(pid) != parent_of(driver)]
    return far


def wait_well(cluster: HostedCluster, gone: int) -> None:
    def is_well() -> bool:
        return health(cluster.url) == OK and len(all_of(RANK)) == 2 and gone not in all_of(RANK)

    wait_until(is_well, "the group is back")
    assert answer_of(cluster) == counted("c", 8)


def test_it_is_told_how_a_far_rank_ended_and_what_it_said(cluster: HostedCluster) -> None:
    victim = far_rank()
    os.kill(victim, signal.SIGABRT)  # of which Python leaves a few lines
    said: list[str] = []

    def has_been_told() -> bool:
        said.append(health(cluster.url))
        return "its last lines" in said[-1]

    wait_until(has_been_told, "health tells what the rank said last", 30)
    assert re.search(rf"rank 1 \(pid {victim} on [\d.]+\) (was ended by SIGABRT|has ended)", said[-1]), said[-1]
    wait_well(cluster, victim)


def test_a_far_rank_that_hangs_is_ended_though_it_does_not_hear_ray(cluster: HostedCluster) -> None:
    victim = far_rank()
    os.kill(victim, signal.SIGSTOP)
    wait_until(lambda: health(cluster.url) != OK, "health is off", 30)
    wait_well(cluster, victim)


def test_a_lost_guard_is_replaced_with_the_next_restart_and_disturbs_nobody(cluster: HostedCluster) -> None:
    (guard,) = all_of(GUARD)
    kill(guard)
    victim = far_rank()
    kill(victim)
    wait_until(lambda: f"pid {victim}" in health(cluster.url), "the death is told by Ray alone", 30)
    wait_well(cluster, victim)
    wait_until(lambda: len(all_of(GUARD)) == 1 and guard not in all_of(GUARD), "there is another guard", 30)


def test_a_group_whose_nodes_are_lost_comes_back_once_there_is_room(cluster: HostedCluster) -> None:
    assert answer_of(cluster) == counted("c", 8)
    cluster.tell("lose 1")
    cluster.tell("lose 2")
    wait_until(lambda: "2 bundles of 1 CPU wanted" in health(cluster.url), "it is said what is missing")
    refused = ask(cluster)
    assert refused.status_code == 503, refused.text
    assert int(refused.headers["retry-after"]) >= 1
    cluster.tell("add 2")
    wait_until(lambda: health(cluster.url) == OK, "the group is back")
    assert answer_of(cluster) == counted("c", 8)


def test_streams_go_on_for_a_while_when_a_gcs_is_lost_that_cannot_come_back(
    cluster: HostedCluster,
) -> None:
    streams = begun(cluster.url, 2)
    cluster.tell("kill-gcs")
    time.sleep(WITHOUT_S)
    assert answer_of(cluster) == counted("c", 8)
    for stream in streams:
        stream.check()
