"""The workers' wait, read from a server's metrics before and after a level."""

import httpx
import pytest

from cluster.bench.worker_time import wait_share, worker_seconds

OURS = """# HELP shardserve_worker_seconds_total Where the time went
# TYPE shardserve_worker_seconds_total counter
shardserve_worker_seconds_total{part="wait"} 1.5
shardserve_worker_seconds_total{part="forward"} 4.5
"""


@pytest.mark.parametrize(
    ("status", "text", "expected"),
    [
        (200, OURS, {"wait": 1.5, "forward": 4.5}),
        (200, "# TYPE other counter\nother_total 3\n", None),
        (200, "<html>no metrics here</html>", None),
        (404, OURS, None),
    ],
)
async def test_only_a_server_that_says_it_is_read(
    status: int, text: str, expected: dict[str, float] | None
) -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(status, text=text))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        assert await worker_seconds(client) == expected


async def test_a_server_that_does_not_answer_says_nothing() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    async with httpx.AsyncClient(transport=httpx.MockTransport(refuse), base_url="http://server") as client:
        assert await worker_seconds(client) is None


def test_the_share_is_of_what_was_spent_in_between() -> None:
    before = {"wait": 10.0, "forward": 100.0}
    assert wait_share(before, {"wait": 11.0, "forward": 103.0}) == 0.25
    assert wait_share(before, before) is None
    assert wait_share(None, before) is None
    assert wait_share(before, None) is None
