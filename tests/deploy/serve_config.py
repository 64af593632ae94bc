"""Serve configs against Ray's own schema, with our args checked.

Ray drops keys that it does not know in silence; here they are problems. Knows the shape of a config, and starts
nothing.
"""

import typing
from collections.abc import Iterator
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from ray.serve.schema import ServeDeploySchema

from cluster.config import ClusterConfig
from cluster.errors import InvalidConfig

BUILDER = "cluster.application:build"


def serve_config_problems(text: str) -> list[str]:
    """Everything wrong with the config, one line each."""
    try:
        config = yaml.safe_load(text)
    except yaml.YAMLError as error:
        return [f"not YAML: {error}"]
    if not isinstance(config, dict):
        return [f"a Serve config is a mapping, not {type(config).__name__}"]
    problems = list(_unknown_keys(ServeDeploySchema, config, "config"))
    try:
        parsed = ServeDeploySchema.model_validate(config)
    except ValidationError as error:
        return problems + [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
    for application in parsed.applications:
        problems += _application_problems(application.name, application.import_path, application.args)
    return problems


def _application_problems(name: str, import_path: str, args: dict[str, Any]) -> Iterator[str]:
    if import_path != BUILDER:
        yield f"{name}: import_path is {import_path}, not {BUILDER}"
        return
    try:
        ClusterConfig.parse(args)
    except InvalidConfig as error:
        yield f"{name}: args: {error}"


def _unknown_keys(model: type[BaseModel], raw: dict[str, Any], where: str) -> Iterator[str]:
    for key, value in raw.items():
        field = model.model_fields.get(key)
        if field is None:
            yield f"{where}: unknown key {key!r}"
            continue
        for nested in _models_in(field.annotation):
            items = value if isinstance(value, list) else [value]
            for index, item in enumerate(items):
                if isinstance(item, dict):
                    place = f"{where}.{key}[{index}]" if isinstance(value, list) else f"{where}.{key}"
                    yield from _unknown_keys(nested, item, place)


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The pydantic models of `X`, `X | None` and `list[X]`, however they are nested."""
    if isinstance(annotation, type):
        if issubclass(annotation, BaseModel):
            yield annotation
        return
    for argument in typing.get_args(annotation):
        yield from _models_in(argument)
