"""What the schema of a RayService does not say: the rules that KubeRay's operator applies later, and ours.

KubeRay 1.7 refuses the first group with an event on the resource, after `kubectl apply` has said "created". The
second group holds what would be accepted and then not work. Knows parsed documents; reads no files.
"""

import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

import yaml

_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")  # a DNS-1035 label
_LONGEST_NAME = 47
_UPGRADES = ("NewCluster", "NewClusterWithIncrementalUpgrade", "None")
_START_RESOURCES = ("num-cpus", "num-gpus", "memory", "resources")
_SAME_ON_ALL_NODES = ("RAY_SERVE_ENABLE_HA_PROXY", "RAY_SERVE_THROUGHPUT_OPTIMIZED")
_FIRST_WITH_TOKENS = (2, 52)
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)(m|[kMGTPE]i?)?")
_SCALE = {"": Decimal(1), "m": Decimal("0.001"), "k": Decimal(1000)} | {
    unit + suffix: Decimal(base) ** power
    for power, unit in enumerate("KMGTPE", 1)
    for suffix, base in (("", 1000), ("i", 1024))
}

Spec = Mapping[str, Any]


def quantity(value: Any) -> Decimal:
    """A Kubernetes quantity as a number. Raises ValueError where it is none."""
    match = _QUANTITY.fullmatch(str(value))
    if match is None:
        raise ValueError(f"not a quantity: {value!r}")
    return Decimal(match[1]) * _SCALE[match[2] or ""]


def operator_problems(service: Spec) -> Iterator[str]:
    """What the operator would refuse."""
    name, spec = service["metadata"]["name"], service["spec"]
    cluster = spec["rayClusterConfig"]
    if len(name) > _LONGEST_NAME or not _NAME.fullmatch(name):
        yield f"metadata.name: {name!r} must be a DNS label of at most {_LONGEST_NAME} characters"
    upgrade = spec.get("upgradeStrategy", {})
    if upgrade.get("type", "NewCluster") not in _UPGRADES:
        yield f"upgradeStrategy.type: {upgrade['type']!r} is none of {', '.join(_UPGRADES)}"
    if upgrade.get("type") == "NewClusterWithIncrementalUpgrade":
        if not cluster.get("enableInTreeAutoscaling"):
            yield "upgradeStrategy: an incremental upgrade needs enableInTreeAutoscaling"
        if not upgrade.get("clusterUpgradeOptions", {}).get("gatewayClassName"):
            yield "upgradeStrategy: an incremental upgrade needs clusterUpgradeOptions.gatewayClassName"
    if cluster["headGroupSpec"].get("headService", {}).get("metadata", {}).get("name"):
        yield "headGroupSpec.headService.metadata.name must not be set in a RayService"
    yield from _token_problems(cluster)
    yield from _redis_problems(cluster)
    names = [group["groupName"] for group in cluster.get("workerGroupSpecs", [])]
    for repeated in sorted({each for each in names if names.count(each) > 1}):
        yield f"workerGroupSpecs: two groups are called {repeated!r}"
    for where, group in _groups(cluster):
        yield from _group_problems(where, group, cluster)


def our_problems(service: Spec, ray_version: str) -> Iterator[str]:
    """What the operator would accept, and what would then not work."""
    cluster = service["spec"]["rayClusterConfig"]
    if cluster.get("rayVersion") != ray_version:
        yield f"rayVersion: {cluster.get('rayVersion')!r} is not {ray_version}, which the image has"
    head = cluster["headGroupSpec"]
    if head.get("rayStartParams", {}).get("num-cpus") != "0":
        yield 'headGroupSpec: rayStartParams needs num-cpus: "0", or ranks land on the head'
    if "serve" not in [port.get("name") for port in _containers(head)[0].get("ports", [])]:
        yield "headGroupSpec: no container port is named serve, so KubeRay builds no service for traffic"
    for variable in _SAME_ON_ALL_NODES:
        values = {where: _environment(group).get(variable) for where, group in _groups(cluster)}
        if len(set(values.values())) > 1:
            yield f"{variable} must be the same on all nodes: {values}"
    for where, group in _groups(cluster):
        yield from _pod_problems(where, group["template"]["spec"])
        yield from _shared_memory_problems(where, group)
    yield from _room_problems(service["spec"])


def _groups(cluster: Spec) -> Iterator[tuple[str, Spec]]:
    yield "headGroupSpec", cluster["headGroupSpec"]
    for group in cluster.get("workerGroupSpecs", []):
        yield f"workerGroupSpecs[{group['groupName']}]", group


def _containers(group: Spec) -> list[Spec]:
    containers: list[Spec] = group["template"]["spec"]["containers"]
    return containers


def _limits(group: Spec) -> Spec:
    limits: Spec = _containers(group)[0].get("resources", {}).get("limits", {})
    return limits


def _environment(group: Spec) -> dict[str, Any]:
    return {each["name"]: each.get("value") for each in _containers(group)[0].get("env", [])}


def _token_problems(cluster: Spec) -> Iterator[str]:
    options = cluster.get("authOptions", {})
    version = tuple(int(part) for part in re.findall(r"\d+", cluster.get("rayVersion", "0.0"))[:2])
    if options.get("mode") == "token" and version < _FIRST_WITH_TOKENS:
        yield f"authOptions.mode: token needs Ray 2.52 or newer, rayVersion is {cluster.get('rayVersion')!r}"
    if options.get("enableK8sTokenAuth"):
        yield "authOptions.enableK8sTokenAuth does not work in a RayService"


def _redis_problems(cluster: Spec) -> Iterator[str]:
    set_on_head = _environment(cluster["headGroupSpec"])
    if "RAY_REDIS_ADDRESS" in set_on_head:
        yield "headGroupSpec: RAY_REDIS_ADDRESS is given by gcsFaultToleranceOptions, not by env"
    if "REDIS_PASSWORD" in set_on_head and "gcsFaultToleranceOptions" in cluster:
        yield "headGroupSpec: REDIS_PASSWORD is given by gcsFaultToleranceOptions, not by env"


def _group_problems(where: str, group: Spec, cluster: Spec) -> Iterator[str]:
    params = group.get("rayStartParams", {})
    if not _containers(group):
        yield f"{where}: needs a container"
    if "labels" in params:
        yield f"{where}: rayStartParams.labels is refused; use the group's `labels`"
    if group.get("resources") and any(params.get(key) for key in _START_RESOURCES):
        yield f"{where}: resources are set both in rayStartParams and in `resources`"
    if group.get("suspend") and cluster.get("enableInTreeAutoscaling"):
        yield f"{where}: a group cannot be suspended while the autoscaler is on"
    low, high = group.get("minReplicas", 0), group.get("maxReplicas", 2**31 - 1)
    if not 0 <= low <= group.get("replicas", low) <= high:
        yield f"{where}: replicas {group.get('replicas', low)} must be between {low} and {high}"


def _pod_problems(where: str, pod: Spec) -> Iterator[str]:
    volumes = {volume["name"] for volume in pod.get("volumes", [])}
    for container in pod["containers"]:
        place = f"{where}.{container['name']}"
        for mount in container.get("volumeMounts", []):
            if mount["name"] not in volumes:
                yield f"{place}: mounts {mount['name']!r}, which is not among the volumes"
        names = [each["name"] for each in container.get("env", [])]
        for repeated in sorted({each for each in names if names.count(each) > 1}):
            yield f"{place}: env has {repeated} twice"
        yield from _resource_problems(place, container.get("resources", {}))
        pre_stop = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
        grace = pod.get("terminationGracePeriodSeconds", 30)
        if pre_stop[:1] == ["sleep"] and float(pre_stop[1]) >= grace:
            yield f"{place}: preStop sleeps {pre_stop[1]} s, terminationGracePeriodSeconds is {grace}"


def _resource_problems(where: str, resources: Spec) -> Iterator[str]:
    limits = resources.get("limits", {})
    for name in ("cpu", "memory"):
        if name not in limits:
            yield f"{where}: no limit on {name}: Ray would count all of the node as its own"
    for kind in ("requests", "limits"):
        for name, value in resources.get(kind, {}).items():
            try:
                if kind == "requests" and name in limits and quantity(value) > quantity(limits[name]):
                    yield f"{where}: requests {value} of {name}, over its limit {limits[name]}"
                quantity(value)
            except ValueError as error:
                yield f"{where}: {kind}.{name}: {error}"


def _shared_memory_problems(where: str, group: Spec) -> Iterator[str]:
    """NCCL passes what GPUs cannot hand to each other through /dev/shm; a container's own has 64 MiB."""
    gpus = quantity(_limits(group).get("nvidia.com/gpu", 0))
    mounts = {mount["mountPath"]: mount["name"] for mount in _containers(group)[0].get("volumeMounts", [])}
    in_memory = {
        volume["name"]
        for volume in group["template"]["spec"].get("volumes", [])
        if volume.get("emptyDir", {}).get("medium") == "Memory"
    }
    if gpus > 1 and mounts.get("/dev/shm") not in in_memory:
        yield f"{where}: {gpus} GPUs and no volume in memory at /dev/shm"


def _room_problems(spec: Spec) -> Iterator[str]:
    """Each rank takes one CPU, and on CUDA one GPU, of the workers; the head has none to give."""
    for application in yaml.safe_load(spec["serveConfigV2"])["applications"]:
        args = application.get("args", {})
        ranks = args.get("tensor_parallel_size", 1)
        for resource in ("cpu", "nvidia.com/gpu") if args.get("device") == "cuda" else ("cpu",):
            offered = sum(
                group.get("replicas", 0) * quantity(_limits(group).get(resource, 0))
                for group in spec["rayClusterConfig"].get("workerGroupSpecs", [])
            )
            if offered < ranks:
                yield f"{application['name']}: {ranks} ranks need {ranks} {resource}, the workers have {offered}"
