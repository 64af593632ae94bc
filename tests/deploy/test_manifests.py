"""The manifests are what the API server and KubeRay take; and what they would refuse, our checks find."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.validation import manifest_problems

PROJECT = Path(__file__).resolve().parents[2]
MANIFESTS = sorted((PROJECT / "deploy" / "kuberay").glob("*.yaml"))
EXAMPLE = PROJECT / "deploy" / "kuberay" / "rayservice-cpu-tp2.yaml"

Document = dict[str, Any]
Mutation = Callable[[Document], object]


@pytest.fixture(scope="module")
def crds(shared_folder: Path) -> Path:
    return shared_folder / "crds"


@pytest.fixture(scope="module")
def ray_version() -> str:
    pinned = re.search(r"^ray==(\S+)$", (PROJECT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    return pinned[1]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_a_manifest_has_no_problems(path: Path, crds: Path, ray_version: str) -> None:
    assert manifest_problems(path.read_text(), crds, ray_version) == []


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_a_manifest_carries_the_serve_config_beside_it(path: Path) -> None:
    service = next(yaml.safe_load_all(path.read_text()))
    config = yaml.safe_load((PROJECT / "deploy" / "configs" / path.name.removeprefix("rayservice-")).read_text())
    assert yaml.safe_load(service["spec"]["serveConfigV2"]) == config


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_budget_and_policy_select_the_pods_of_the_service(path: Path) -> None:
    service, *others = yaml.safe_load_all(path.read_text())
    cluster = service["spec"]["rayClusterConfig"]
    pods = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    labels = [pod["template"]["metadata"]["labels"] for pod in pods]
    selectors = [
        (each["spec"].get("selector") or each["spec"]["podSelector"])["matchLabels"]
        for each in others
        if each["kind"] in {"PodDisruptionBudget", "NetworkPolicy"}
    ]
    assert len(selectors) == 2
    assert all(selector.items() <= pod.items() for selector in selectors for pod in labels)


def cluster_of(service: Document) -> Document:
    cluster: Document = service["spec"]["rayClusterConfig"]
    return cluster


def head(service: Document) -> Document:
    group: Document = cluster_of(service)["headGroupSpec"]
    return group


def worker(service: Document) -> Document:
    group: Document = cluster_of(service)["workerGroupSpecs"][0]
    return group


def container(group: Document) -> Document:
    first: Document = group["template"]["spec"]["containers"][0]
    return first


def rename(node: Document, old: str, new: str) -> None:
    node[new] = node.pop(old)


SCHEMA_FAULTS: dict[str, tuple[Mutation, str]] = {
    "misspelt field of the spec": (lambda s: rename(s["spec"], "serveConfigV2", "serveConfigv2"), "serveConfigv2"),
    "misspelt field of a group": (lambda s: worker(s).update(replica=1), "'replica' was unexpected"),
    "misspelt field of a pod": (
        lambda s: worker(s)["template"]["spec"].update(terminationGracePeriod=90),
        "terminationGracePeriod",
    ),
    "misspelt metadata": (lambda s: s["metadata"].update(label={}), "'label' was unexpected"),
    "integer start parameter": (
        lambda s: worker(s)["rayStartParams"].update({"num-gpus": 1}),
        r"num-gpus: 1 is not of type 'string'",
    ),
    "integer environment variable": (
        lambda s: container(head(s))["env"].append({"name": "A", "value": 1}),
        "1 is not of type 'string'",
    ),
    "quantity with a unit that is none": (
        lambda s: container(worker(s))["resources"]["limits"].update(memory="8GiB"),
        "'8GiB' does not match",
    ),
    "port without its number": (lambda s: container(head(s))["ports"].append({"name": "x"}), "containerPort"),
    "replicas in words": (lambda s: worker(s).update(replicas="one"), "'one' is not of type 'integer'"),
    "negative delay": (lambda s: s["spec"].update(rayClusterDeletionDelaySeconds=-1), "minimum of 0"),
    "group without a name": (lambda s: worker(s).pop("groupName"), "'groupName' is a required property"),
    "config as a mapping": (lambda s: s["spec"].update(serveConfigV2={}), "is not of type 'string'"),
    "no config": (lambda s: s["spec"].pop("serveConfigV2"), "spec needs serveConfigV2"),
}

RULE_FAULTS: dict[str, tuple[Mutation, str]] = {
    "long name": (lambda s: s["metadata"].update(name="n" * 48), "at most 47"),
    "name with a capital": (lambda s: s["metadata"].update(name="Shardserve"), "DNS label"),
    "unknown upgrade": (lambda s: s["spec"]["upgradeStrategy"].update(type="Rolling"), "'Rolling' is none of"),
    "incremental upgrade without a gateway": (
        lambda s: s["spec"]["upgradeStrategy"].update(type="NewClusterWithIncrementalUpgrade"),
        "gatewayClassName",
    ),
    "named head service": (
        lambda s: head(s).update(headService={"metadata": {"name": "mine"}}),
        "headService.metadata.name",
    ),
    "labels as a start parameter": (
        lambda s: worker(s)["rayStartParams"].update(labels="a=b"),
        "group's `labels`",
    ),
    "resources twice": (
        lambda s: (
            worker(s)["rayStartParams"].update({"num-cpus": "4"}),
            worker(s).update(resources={"CPU": "4"}),
        ),
        "set both in rayStartParams",
    ),
    "replicas over their maximum": (lambda s: worker(s).update(replicas=2), "must be between 1 and 1"),
    "group name twice": (
        lambda s: cluster_of(s)["workerGroupSpecs"].append(worker(s)),
        "two groups are called 'cpu'",
    ),
    "suspended group with autoscaler": (
        lambda s: (cluster_of(s).update(enableInTreeAutoscaling=True), worker(s).update(suspend=True)),
        "cannot be suspended",
    ),
    "token with an old Ray": (lambda s: cluster_of(s).update(rayVersion="2.51.0"), "needs Ray 2.52"),
    "service account token": (
        lambda s: cluster_of(s)["authOptions"].update(enableK8sTokenAuth=True),
        "does not work in a RayService",
    ),
    "redis by env": (
        lambda s: container(head(s))["env"].append({"name": "RAY_REDIS_ADDRESS", "value": "redis:6379"}),
        "gcsFaultToleranceOptions",
    ),
    "another Ray than the image's": (lambda s: cluster_of(s).update(rayVersion="2.59.0"), "is not 2.60.0"),
    "work on the head": (lambda s: head(s)["rayStartParams"].pop("num-cpus"), 'num-cpus: "0"'),
    "no port named serve": (lambda s: container(head(s)).pop("ports"), "named serve"),
    "proxy on workers only": (
        lambda s: container(head(s)).update(env=[]),
        "RAY_SERVE_ENABLE_HA_PROXY must be the same",
    ),
    "mount of nothing": (lambda s: worker(s)["template"]["spec"].pop("volumes"), "mounts 'hub-cache'"),
    "variable twice": (
        lambda s: container(worker(s))["env"].append(container(worker(s))["env"][0]),
        "env has RAY_SERVE_ENABLE_HA_PROXY twice",
    ),
    "request over limit": (
        lambda s: container(worker(s))["resources"]["requests"].update(memory="9Gi"),
        "over its limit 8Gi",
    ),
    "no limit": (lambda s: container(worker(s))["resources"].pop("limits"), "no limit on cpu"),
    "negative quantity": (
        lambda s: container(worker(s))["resources"]["requests"].update(cpu="-1"),
        "not a quantity: '-1'",
    ),
    "no time after preStop": (
        lambda s: worker(s)["template"]["spec"].update(terminationGracePeriodSeconds=60),
        "preStop sleeps 60 s",
    ),
    "ranks without CPUs": (
        lambda s: container(worker(s))["resources"].update(limits={"cpu": "1500m", "memory": "8Gi"}, requests={}),
        r"2 ranks need 2 cpu, the workers have 1\.5",
    ),
    "ranks without GPUs": (
        lambda s: s["spec"].update(
            serveConfigV2=s["spec"]["serveConfigV2"].replace("device: cpu", "device: cuda")
        ),
        r"2 ranks need 2 nvidia\.com/gpu, the workers have 0",
    ),
    "GPUs with a container's own shared memory": (
        lambda s: container(worker(s))["resources"]["limits"].update({"nvidia.com/gpu": "2"}),
        "2 GPUs and no volume in memory at /dev/shm",
    ),
    "unknown setting": (
        lambda s: s["spec"].update(serveConfigV2=s["spec"]["serveConfigV2"].replace("device:", "devise:")),
        "args: devise",
    ),
}


@pytest.mark.parametrize("fault", [*SCHEMA_FAULTS, *RULE_FAULTS])
def test_a_fault_is_found(fault: str, crds: Path, ray_version: str) -> None:
    mutate, words = {**SCHEMA_FAULTS, **RULE_FAULTS}[fault]
    service = next(yaml.safe_load_all(EXAMPLE.read_text()))
    mutate(service)
    problems = manifest_problems(yaml.safe_dump(service), crds, ray_version)
    assert any(re.search(words, line) for line in problems), problems


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("maxUnavailable: 1", "maxUnavailble: 1", "maxUnavailble"),
        ("podSelector:", "podSelektor:", "podSelektor"),
        ("policy/v1", "policy/v9", "find schema"),
    ],
)
def test_a_fault_in_a_core_object_is_found(old: str, new: str, words: str, crds: Path, ray_version: str) -> None:
    text = EXAMPLE.read_text()
    assert old in text
    problems = manifest_problems(text.replace(old, new), crds, ray_version)
    assert any(words in line for line in problems), problems
