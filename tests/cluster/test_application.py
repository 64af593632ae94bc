"""What `build` deploys. Without Ray."""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray import serve
from ray.exceptions import RaySystemError

from cluster.application import DRIVER, INGRESS, _placement_explainer, build
from cluster.config import ClusterConfig
from cluster.errors import InvalidConfig
from cluster.launch.unplaced import UnplacedDrivers

SETTINGS = {"model": "somewhere", "device": "cpu", "tensor_parallel_size": "2", "drain_deadline_s": 30}


def test_an_ingress_over_a_driver_that_has_a_bundle_a_rank() -> None:
    ingress: Any = build(SETTINGS)._bound_deployment
    driver = ingress.init_args[1]._bound_deployment

    assert (ingress.name, driver.name) == (INGRESS, DRIVER)
    assert driver._replica_config.placement_group_bundles == [{"CPU": 1}, {"CPU": 1}]
    for deployment in (ingress, driver):
        assert deployment.ray_actor_options["num_cpus"] == 0
        assert deployment._deployment_config.health_check_period_s == 2
        assert deployment._deployment_config.graceful_shutdown_timeout_s > 30
        assert deployment._deployment_config.max_ongoing_requests >= 10**6


def test_copies_are_drivers_and_ingresses_and_calls_find_their_driver() -> None:
    ingress: Any = build({**SETTINGS, "replicas": 3})._bound_deployment
    driver = ingress.init_args[1]._bound_deployment
    assert (ingress.num_replicas, driver.num_replicas) == (3, 3)
    router = driver._deployment_config.request_router_config.get_request_router_class()
    assert router.__name__ == "ByAddress"


def test_settings_may_be_checked_already() -> None:
    config = ClusterConfig.parse(SETTINGS)
    assert build(config)._bound_deployment.init_args[0] == config


def test_mistakes_are_all_named() -> None:
    with pytest.raises(InvalidConfig, match=r"tensor_parallel_size: .*; tensor_parallel: Extra inputs"):
        build({"model": "x", "tensor_parallel_size": 0, "tensor_parallel": 2})


def test_serve_sees_a_builder_of_one_parameter() -> None:
    assert len(inspect.signature(build).parameters) == 1


def test_why_there_is_no_driver_is_not_known_while_ray_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise RaySystemError("the GCS is away")

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(serve, "get_replica_context", lambda: SimpleNamespace(app_name="shardserve"))
    monkeypatch.setattr(UnplacedDrivers, "look", fail)
    assert _placement_explainer()() is None
