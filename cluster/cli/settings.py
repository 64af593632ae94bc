"""From options and a YAML file to checked settings, with every mistake named where the user made it.

Knows option names, YAML and the two groups of settings; starts nothing.
"""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from cluster.config import ClusterConfig
from cluster.errors import InvalidConfig
from cluster.launch.launcher import LaunchOptions

Settings = dict[str, Any]
_LAUNCH_NAMES = frozenset(field.name for field in fields(LaunchOptions))


def cluster_config(given: Mapping[str, Any], file: Path | None) -> ClusterConfig:
    """For a command without an address to serve at. Raises `InvalidConfig`, one line a mistake."""
    config, _ = serve_settings(given, file)
    return config


def serve_settings(given: Mapping[str, Any], file: Path | None) -> tuple[ClusterConfig, LaunchOptions]:
    """`given` are options by setting name, None where the user gave none. Raises `InvalidConfig`."""
    from_file = _read(file) if file is not None else {}
    chosen = {name: value for name, value in given.items() if value is not None}
    merged = from_file | chosen
    if "model" not in merged:
        raise InvalidConfig("MODEL is missing: name it as the argument, or as `model` in the --config file")
    mistakes: list[str] = []
    config = launch = None
    try:
        config = ClusterConfig.model_validate({n: v for n, v in merged.items() if n not in _LAUNCH_NAMES})
    except ValidationError as error:
        mistakes += _lines(error, chosen, file)
    try:
        launch = TypeAdapter(LaunchOptions).validate_python(
            {n: v for n, v in merged.items() if n in _LAUNCH_NAMES}
        )
    except ValidationError as error:
        mistakes += _lines(error, chosen, file)
    if config is None or launch is None:
        raise InvalidConfig("\n".join(mistakes))
    return config, launch


def settings_among(options: Mapping[str, Any]) -> Settings:
    """Of a command's options, by the names of its parameters, those that are settings."""
    known = _LAUNCH_NAMES | ClusterConfig.model_fields.keys()
    named = {"tensor_parallel_size" if name == "tp" else name: value for name, value in options.items()}
    return {name: value for name, value in named.items() if name in known}


def _read(file: Path) -> Settings:
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidConfig(f"--config {file}: {error.strerror or error}") from None
    except (yaml.YAMLError, ValueError) as error:  # not UTF-8, or a number of 5000 digits
        raise InvalidConfig(f"--config {file}: not YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise InvalidConfig(f"--config {file}: settings by name are wanted, as in `tensor_parallel_size: 2`")
    return content


def _lines(error: ValidationError, chosen: Mapping[str, Any], file: Path | None) -> list[str]:
    return [_line(mistake, chosen, file) for mistake in error.errors()]


def _line(mistake: Any, chosen: Mapping[str, Any], file: Path | None) -> str:
    name = str(mistake["loc"][0]) if mistake["loc"] else ""
    reason: str = mistake["msg"].removeprefix("Value error, ")
    if not name:  # a rule over several settings, which names them itself
        return reason
    if mistake["type"] == "extra_forbidden":
        return f"{file}: there is no setting {name!r}"
    where = option_name(name) if name in chosen else f"{file}: {name}"
    what = f"{where}: {reason[0].lower()}{reason[1:]}"
    if mistake["type"] == "value_error":  # our own text, which shows the value itself
        return what
    return f"{what}, not {mistake['input']!r}"


def option_name(setting: str) -> str:
    """How the user gives a setting on the command line."""
    if setting == "model":
        return "MODEL"
    return "--tp" if setting == "tensor_parallel_size" else f"--{setting.replace('_', '-')}"
