"""Typed access to a mapping that came from a file: what is missing or of a wrong type is named with the file.

Knows plain values; knows nothing of models.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model_shards.errors import CheckpointError


class Fields:
    """Every method raises `CheckpointError` for a value of another type. A null counts as absent."""

    def __init__(self, file: Path, values: Mapping[str, Any]) -> None:
        self.file = file
        self.values = values

    def integer(self, key: str, default: int | None = None) -> int:
        """The value, or `default`; without a default the key must be there."""
        value = self.optional_integer(key)
        if value is not None:
            return value
        if default is None:
            raise CheckpointError(f"{self.file}: {key} is missing")
        return default

    def optional_integer(self, key: str) -> int | None:
        value = self.values.get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise CheckpointError(f"{self.file}: {key} is {value!r}, not an integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key, default)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"{self.file}: {key} is missing")
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise CheckpointError(f"{self.file}: {key} is {value!r}, not a number")
        return float(value)

    def flag(self, key: str) -> bool | None:
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise CheckpointError(f"{self.file}: {key} is {value!r}, not true or false")
        return value
