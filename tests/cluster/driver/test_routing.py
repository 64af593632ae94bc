"""A call that names a replica goes there or fails at once. Without Ray: the choice alone."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.driver.routing import ByAddress, DriverGone


def replica(address: str) -> Any:
    return SimpleNamespace(replica_id=SimpleNamespace(unique_id=address))


def pending(address: str) -> Any:
    future: asyncio.Future[Any] = asyncio.Future()
    return SimpleNamespace(metadata=SimpleNamespace(session_id=address), future=future)


@pytest.fixture
def router() -> Any:
    return ByAddress.__new__(ByAddress)  # its choice needs nothing of what Serve gives it


CANDIDATES = [replica("a"), replica("b")]


async def test_a_named_replica_alone_is_chosen(router: Any) -> None:
    call = pending("b")
    assert await router.choose_replicas(CANDIDATES, call) == [[CANDIDATES[1]]]
    assert not call.future.done()


async def test_any_will_do_for_a_call_without_a_name(router: Any) -> None:
    assert await router.choose_replicas(CANDIDATES, pending("")) == [CANDIDATES]
    assert await router.choose_replicas(CANDIDATES, None) == [CANDIDATES]


async def test_a_replica_that_is_gone_ends_the_search(router: Any) -> None:
    call = pending("c")
    assert await router.choose_replicas(CANDIDATES, call) == [CANDIDATES], "or Serve would search on for ever"
    with pytest.raises(DriverGone, match="driver c is gone"):
        call.future.result()


async def test_a_call_that_was_given_up_is_left_alone(router: Any) -> None:
    call = pending("c")
    call.future.cancel()
    await router.choose_replicas(CANDIDATES, call)
    assert call.future.cancelled()
