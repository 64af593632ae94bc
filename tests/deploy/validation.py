"""One call that says everything wrong with a file of manifests: the sum of the checks in this folder."""

from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

from tests.deploy.crd_schema import load_crd_schema, schema_problems, without_nulls
from tests.deploy.kuberay_rules import operator_problems, our_problems
from tests.deploy.serve_config import serve_config_problems

KUBERNETES = "1.33"


def manifest_problems(text: str, crds: Path, ray_version: str) -> list[str]:
    """Check every document of the text, a RayService in depth, one line for each problem.

    `crds` is a folder with the CRDs of KubeRay.
    """
    problems: list[str] = []
    for document in yaml.safe_load_all(text):
        if document["kind"] == "RayService":
            found = _ray_service_problems(document, crds, ray_version)
        else:
            found = _core_problems(document)
        problems += [f"{document['kind']} {document['metadata'].get('name')}: {line}" for line in found]
    return problems


def _ray_service_problems(document: dict[str, Any], crds: Path, ray_version: str) -> list[str]:
    found = schema_problems(document, load_crd_schema(crds / "ray.io_rayservices.yaml"))
    if found:  # the rules read fields that the schema has found to be there
        return found
    pruned = without_nulls(document)
    if "serveConfigV2" not in pruned.get("spec", {}) or "rayClusterConfig" not in pruned["spec"]:
        return ["spec needs serveConfigV2 and rayClusterConfig"]
    found = [f"serveConfigV2: {line}" for line in serve_config_problems(pruned["spec"]["serveConfigV2"])]
    found += operator_problems(pruned)
    if not found:
        found += our_problems(pruned, ray_version)
    return found


def _core_problems(document: dict[str, Any]) -> list[str]:
    try:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{'.'.join(map(str, error.path))}: {error.message}"]
    except kubernetes_validate.SchemaNotFoundError as error:
        return [error.message]
    return []
