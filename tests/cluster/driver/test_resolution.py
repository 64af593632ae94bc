"""What a user set, as a rank is told it."""

import pytest

from cluster.driver.resolution import resolve_device
from cluster.errors import InvalidConfig


def test_ranks_compute_on_the_cpu() -> None:
    assert resolve_device("auto") == "cpu"
    assert resolve_device("cpu") == "cpu"


def test_a_device_without_attention_is_refused_by_name() -> None:
    with pytest.raises(InvalidConfig, match="device: cuda cannot be used yet"):
        resolve_device("cuda")
