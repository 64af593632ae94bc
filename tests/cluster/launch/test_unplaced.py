"""Which placement groups a launcher speaks of while it waits. Without Ray."""

import importlib
from typing import Any

import pytest

from cluster.launch.unplaced import UnplacedDrivers, waiting_bundles

BUNDLES = {0: {"CPU": 64.0}, 1: {"CPU": 64.0}}
OURS = "SERVE_REPLICA::shardserve#Driver#abc"


def group(name: str = OURS, state: str = "PENDING") -> dict[str, Any]:
    return {"name": name, "state": state, "bundles": BUNDLES}


def test_a_driver_of_ours_that_waits() -> None:
    assert waiting_bundles({"1": group("other", "PENDING"), "2": group()}, "shardserve") == [{"CPU": 64.0}] * 2


@pytest.mark.parametrize(
    "groups", [{}, {"1": group(state="CREATED")}, {"1": group("SERVE_REPLICA::another#Driver#abc")}]
)
def test_nobody_waits(groups: dict[str, Any]) -> None:
    assert waiting_bundles(groups, "shardserve") is None


def test_it_speaks_once_and_not_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    groups = {"1": group()}
    module = importlib.import_module("ray.util.placement_group")  # its parent has a function of that name
    monkeypatch.setattr(module, "placement_group_table", lambda: groups)
    monkeypatch.setattr("cluster.driver.placement.node_offers", list)
    unplaced = UnplacedDrivers("shardserve", clock=lambda: now)
    assert not unplaced.look(), "Ray may be about to place it"
    now = 10.0
    assert unplaced.look()
    assert unplaced.demand == "2 bundles of 64 CPU wanted; the cluster has no live node"
    assert not unplaced.look(), "nothing new"
    groups.clear()
    assert not unplaced.look()
    assert unplaced.demand is None
