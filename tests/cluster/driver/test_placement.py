"""Bundles, the order of ranks over nodes, and what is said when there is no place. Without Ray."""

from cluster.driver.placement import NodeOffer, bundles_for, describe_demand, order_seats


def test_one_bundle_a_rank_with_a_gpu_on_cuda() -> None:
    assert bundles_for(2, "cpu") == [{"CPU": 1}, {"CPU": 1}]
    assert bundles_for(2, "cuda") == [{"CPU": 1, "GPU": 1}, {"CPU": 1, "GPU": 1}]


def test_bundles_are_not_shared() -> None:
    first, second = bundles_for(2, "cpu")
    first["CPU"] = 5
    assert second == {"CPU": 1}


def test_ranks_start_on_the_drivers_node_and_stay_together() -> None:
    seats = order_seats({0: "b", 1: "a", 2: "b", 3: "c", 4: "a"}, driver_node="a")

    assert [seat.rank for seat in seats] == [0, 1, 2, 3, 4]
    assert [seat.node_id for seat in seats] == ["a", "a", "b", "b", "c"]
    assert [seat.bundle_index for seat in seats] == [1, 4, 0, 2, 3]


def test_a_driver_on_a_node_without_bundles_changes_nothing() -> None:
    seats = order_seats({0: "b", 1: "a", 2: "b"}, driver_node="elsewhere")

    assert [seat.bundle_index for seat in seats] == [0, 2, 1]


def test_demand_is_shown_against_what_each_node_offers() -> None:
    offers = [
        NodeOffer("node 10.0.0.1 (aa)", {"CPU": 2.0, "memory": 5e9}, {"CPU": 1.0}),
        NodeOffer("node 10.0.0.2 (bb)", {"CPU": 8.0, "GPU": 1.0}, {}),
    ]

    assert describe_demand([{"CPU": 1, "GPU": 1}] * 2, offers) == (
        "2 bundles of 1 CPU, 1 GPU wanted; node 10.0.0.1 (aa) has 2 CPU, 0 GPU, free 1 CPU, 0 GPU; "
        "node 10.0.0.2 (bb) has 8 CPU, 1 GPU, free 0 CPU, 0 GPU"
    )


def test_a_cluster_without_nodes_is_said() -> None:
    assert describe_demand([{"CPU": 1}], []) == "1 bundles of 1 CPU wanted; the cluster has no live node"
