"""Custom resources against the OpenAPI schema of their CRD, with unknown fields refused.

Knows OpenAPI as Kubernetes uses it: int-or-string, defaults that fill what is required, objects that keep unknown
fields. Does not evaluate CEL rules.
"""

import functools
from pathlib import Path
from typing import Any, cast

import jsonschema
import yaml

# Annotations for the API server, or keywords that JSON schema gives another meaning.
_DROPPED = ("format", "nullable", "default", "description", "x-kubernetes-")


@functools.cache
def load_crd_schema(path: Path, version: str = "v1") -> dict[str, Any]:
    """The strict JSON schema of one version of the CRD in the file."""
    crd = yaml.load(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    served = next(each for each in crd["spec"]["versions"] if each["name"] == version)
    schema = _strict(served["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {
        "type": "object",
        "required": ["name"],
        "properties": {
            "name": {"type": "string"},
            "namespace": {"type": "string"},
            "labels": {"type": "object", "additionalProperties": {"type": "string"}},
            "annotations": {"type": "object", "additionalProperties": {"type": "string"}},
        },
        "additionalProperties": False,
    }
    return schema


def schema_problems(document: dict[str, Any], schema: dict[str, Any]) -> list[str]:
    """What the schema says against the document, one line each, with the path of the field."""
    errors = jsonschema.Draft202012Validator(schema).iter_errors(without_nulls(document))
    return [f"{'.'.join(map(str, error.absolute_path)) or 'document'}: {error.message}" for error in errors]


def without_nulls(node: Any) -> Any:
    """The node as the API server sees it, which prunes fields that are null."""
    if isinstance(node, dict):
        return {key: without_nulls(value) for key, value in node.items() if value is not None}
    if isinstance(node, list):
        return [without_nulls(item) for item in node]
    return node


def _strict(schema: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema of an OpenAPI one: defaulted properties optional, unknown properties refused."""
    strict = {key: value for key, value in schema.items() if not key.startswith(_DROPPED)}
    if schema.get("x-kubernetes-int-or-string"):
        strict.pop("type", None)
        strict["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if "properties" in schema:
        properties = cast(dict[str, dict[str, Any]], schema["properties"])
        strict["properties"] = {name: _strict(each) for name, each in properties.items()}
        strict["required"] = [
            name for name in schema.get("required", []) if "default" not in properties.get(name, {})
        ]
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            strict.setdefault("additionalProperties", False)
    if isinstance(schema.get("items"), dict):
        strict["items"] = _strict(schema["items"])
    if isinstance(schema.get("additionalProperties"), dict):
        strict["additionalProperties"] = _strict(schema["additionalProperties"])
    return strict
