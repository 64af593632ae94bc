"""Where ranks go: the bundles asked of Ray, their placement group, and the order of ranks over nodes.

Ray's PACK does not keep consecutive bundles on one node, so ranks are numbered here: the driver's node first, then
node by node. Knows bundles and nodes; knows nothing of models, steps or what a rank does.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.errors import StartupFailed
from workers.config import Device

logger = logging.getLogger(__name__)

STRATEGY = "PACK"
_WARN_AFTER_S = 5.0

Bundle = dict[str, float]


@dataclass(frozen=True, slots=True)
class Seat:
    """One rank's place: the bundle it runs in and the node that bundle is on."""

    rank: int
    bundle_index: int
    node_id: str


@dataclass(frozen=True, slots=True)
class NodeOffer:
    """What one node has in all and what of it is free now."""

    name: str
    total: Mapping[str, float]
    free: Mapping[str, float]


def bundles_for(size: int, device: Device) -> list[Bundle]:
    """One bundle a rank. The first also holds the driver, which asks for nothing of its own."""
    bundle: Bundle = {"CPU": 1} if device == "cpu" else {"CPU": 1, "GPU": 1}
    return [dict(bundle) for _ in range(size)]


def order_seats(bundle_nodes: Mapping[int, str], driver_node: str) -> tuple[Seat, ...]:
    """Number the ranks: bundles of the driver's node, then of each other node, in bundle order within a node."""
    first_bundle: dict[str, int] = {}
    for index in sorted(bundle_nodes):
        first_bundle.setdefault(bundle_nodes[index], index)
    order = sorted(
        bundle_nodes,
        key=lambda index: (bundle_nodes[index] != driver_node, first_bundle[bundle_nodes[index]], index),
    )
    return tuple(Seat(rank, index, bundle_nodes[index]) for rank, index in enumerate(order))


class Placement:
    """A placement group with a seat for every rank. Removes the group at `release()` only if it made it."""

    def __init__(self, group: PlacementGroup, seats: Sequence[Seat], *, owned: bool) -> None:
        self._group = group
        self._owned = owned
        self.seats = tuple(seats)

    @classmethod
    def current_or_new(cls, bundles: Sequence[Bundle], deadline_s: float) -> "Placement":
        """The group this actor was started in (a Serve replica's), or else one of our own.

        Raises `StartupFailed` when the bundles cannot be had by the deadline.
        """
        group = ray.util.get_current_placement_group()
        owned = group is None
        if group is None:
            group = reserve(bundles, deadline_s)
        elif len(group.bundle_specs) != len(bundles):
            raise StartupFailed(
                f"{len(bundles)} ranks need {len(bundles)} bundles; the driver's placement group has "
                f"{len(group.bundle_specs)}"
            )
        nodes = placement_group_table(group)["bundles_to_node_id"]
        seats = order_seats(nodes, ray.get_runtime_context().get_node_id())
        return cls(group, seats, owned=owned)

    def strategy(self, seat: Seat) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=seat.bundle_index)

    def release(self) -> None:
        if self._owned:
            self._owned = False
            remove_placement_group(self._group)


def reserve(bundles: Sequence[Bundle], deadline_s: float) -> PlacementGroup:
    """A new placement group, ready to use. Raises `StartupFailed` with demand against what each node offers."""
    group: PlacementGroup = ray.util.placement_group(list(bundles), strategy=STRATEGY)
    try:
        early = min(_WARN_AFTER_S, deadline_s)
        started = time.monotonic()
        if group.wait(early):
            return group
        logger.warning("still waiting for a place: %s", describe_demand(bundles, node_offers()))
        if group.wait(max(0.0, deadline_s - (time.monotonic() - started))):
            return group
    except BaseException:
        remove_placement_group(group)
        raise
    message = describe_demand(bundles, node_offers())
    remove_placement_group(group)
    raise StartupFailed(f"no place for the ranks within {deadline_s:g} s: {message}")


def describe_demand(bundles: Sequence[Bundle], offers: Sequence[NodeOffer]) -> str:
    """Demand against supply, in one paragraph that names every node."""
    demand = f"{len(bundles)} bundles of {_amounts(bundles[0], bundles[0])} wanted"
    if not offers:
        return f"{demand}; the cluster has no live node"
    keys = bundles[0]
    nodes = "; ".join(
        f"{offer.name} has {_amounts(offer.total, keys)}, free {_amounts(offer.free, keys)}" for offer in offers
    )
    return f"{demand}; {nodes}"


def offered_gpus() -> int:
    """GPUs of all live nodes, free or not."""
    return int(sum(offer.total.get("GPU", 0) for offer in node_offers()))


def node_offers() -> list[NodeOffer]:
    """Every live node of the cluster this process is connected to."""
    free: dict[str, dict[str, float]] = ray._private.state.available_resources_per_node()
    return [_offer(node, free.get(node["NodeID"], {})) for node in ray.nodes() if node["Alive"]]


def _offer(node: dict[str, Any], free: Mapping[str, float]) -> NodeOffer:
    return NodeOffer(f"node {node['NodeManagerAddress']} ({node['NodeID'][:8]})", node["Resources"], free)


def _amounts(resources: Mapping[str, float], keys: Mapping[str, float]) -> str:
    return ", ".join(f"{resources.get(key, 0):g} {key}" for key in keys)
