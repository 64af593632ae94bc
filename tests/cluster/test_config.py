"""Settings of a cluster: sizes in bytes, and how mistakes read."""

from pathlib import Path

import pytest

from cluster.config import ClusterConfig, parse_bytes
from cluster.errors import InvalidConfig


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GiB", 2**31),
        ("1.5 kb", 1500),
        ("512mi", 2**29),
        ("1000000", 10**6),
        ("9007199254740993", 2**53 + 1),
        (7, 7),
        (None, None),
    ],
)
def test_sizes(text: object, size: int | None) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("huge", ["9" * 400, "9" * 5000, "9" * 400 + "GiB", "9223372036854775808", 10**400])
def test_a_size_that_no_machine_has_is_refused(huge: object) -> None:
    with pytest.raises(InvalidConfig) as caught:
        ClusterConfig.parse({"model": "m", "kv_cache_memory": huge})
    assert "kv_cache_memory" in str(caught.value)
    assert "below 9223372036854775808" in str(caught.value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("text", ["5XB", "", "1e5", "-1", "x" * 5000])
def test_what_is_no_size_is_refused_with_examples(text: str) -> None:
    with pytest.raises(InvalidConfig, match=r"kv_cache_memory: .*not a size in bytes: .*examples: 2GiB") as caught:
        ClusterConfig.parse({"model": "m", "kv_cache_memory": text})
    assert len(str(caught.value)) < 200


def test_the_name_in_the_api_stays_when_the_files_are_found() -> None:
    config = ClusterConfig.parse({"model": "org/name"}).with_files(Path("/cache/snapshots/1234"))
    assert (config.model, config.model_name) == ("/cache/snapshots/1234", "name")
