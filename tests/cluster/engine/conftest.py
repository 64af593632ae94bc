"""Every test that takes `depth` runs with one and with two plans in flight."""

import pytest


@pytest.fixture(params=[1, 2], ids=["one in flight", "two in flight"])
def depth(request: pytest.FixtureRequest) -> int:
    value = request.param
    assert isinstance(value, int)
    return value
