"""Load patterns: how many at once, when, how long, and what a server supports."""

import asyncio
import re
from typing import Any

import pytest

from cluster.bench.load import BenchPlan, arrival_offsets, closed_loop, measure, open_loop
from cluster.bench.report import as_json, notes, table
from cluster.bench.streaming import CompletionRequest
from cluster.bench.summary import LevelSummary
from cluster.errors import InvalidConfig, StartupFailed
from tests.fakes.openai_server import FakeBehaviour, serve_fake

REQUESTS = [CompletionRequest(model="m", prompt=str(i), max_tokens=1) for i in range(10)]


async def _measure(behaviour: FakeBehaviour, **settings: Any) -> list[LevelSummary]:
    with serve_fake(behaviour) as url:
        plan = BenchPlan(url=url, **{"input_len": 12, "output_len": 4, **settings})
        return [level async for _, level in measure(plan)]


@pytest.mark.parametrize("concurrency", [1, 3, 50])
async def test_closed_loop_keeps_that_many_in_flight(concurrency: int) -> None:
    running = most = 0
    sent: list[str] = []

    async def send(request: CompletionRequest, due: float | None) -> None:
        nonlocal running, most
        assert due is None
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        sent.append(request.prompt)
        running -= 1

    await closed_loop(REQUESTS, concurrency, send)
    assert sorted(sent) == sorted(request.prompt for request in REQUESTS)
    assert most == min(concurrency, len(REQUESTS))


async def test_open_loop_does_not_wait_for_answers() -> None:
    release = asyncio.Event()
    dues: list[float] = []

    async def send(_: CompletionRequest, due: float | None) -> None:
        assert due is not None
        dues.append(due)
        if len(dues) == len(REQUESTS):
            release.set()
        await release.wait()

    offsets = [0.001 * i for i in range(len(REQUESTS))]
    await asyncio.wait_for(open_loop(REQUESTS, offsets, send), 30)
    assert [due - dues[0] for due in dues] == pytest.approx(offsets)


def test_arrivals_are_poisson_and_repeatable() -> None:
    offsets = arrival_offsets(10.0, 2000, seed=1)
    assert offsets == arrival_offsets(10.0, 2000, seed=1)
    assert offsets[0] == 0.0
    assert offsets == sorted(offsets)
    assert offsets[-1] / len(offsets) == pytest.approx(0.1, rel=0.1)


async def test_levels_are_measured_in_turn() -> None:
    behaviour = FakeBehaviour()
    levels = await _measure(behaviour, concurrency=(1, 2), requests=5)
    assert [level.load for level in levels] == ["1 at once", "2 at once"]
    assert [level.completed for level in levels] == [5, 5]
    assert all(level.output_tokens == 20 for level in levels)
    assert behaviour.most_running <= 2


async def test_prompts_have_the_wanted_length_and_are_never_repeated() -> None:
    behaviour = FakeBehaviour()
    (level,) = await _measure(behaviour, concurrency=(2,), requests=6)
    assert level.prompt_tokens_mean == 12
    prompts = [request["prompt"] for request in behaviour.requests]
    assert len(set(prompts)) == len(prompts) == 8  # two of them to warm up
    assert {request["model"] for request in behaviour.requests} == {"fake-model"}


async def test_open_loop_level() -> None:
    (level,) = await _measure(FakeBehaviour(), rate=200.0, requests=8)
    assert (level.load, level.completed) == ("200 requests/s", 8)


async def test_a_server_without_stream_options_is_measured_by_chunks() -> None:
    (level,) = await _measure(FakeBehaviour(refuses_stream_options=True), concurrency=(1,), requests=2)
    assert (level.completed, level.output_tokens, level.tokens_from_usage) == (2, 8, False)
    assert any("no usage" in line for line in notes([level]))


async def test_failures_are_reported_and_the_rest_goes_on() -> None:
    (level,) = await _measure(FakeBehaviour(fails_after_requests=4), concurrency=(1,), requests=5)
    assert (level.completed, level.failed) == (2, 3)
    assert notes([level]) == ["1 at once: 3 x HTTP 500: told to fail later"]


async def test_the_time_limit_cuts_a_level_off() -> None:
    behaviour = FakeBehaviour(stalls_after_requests=2)  # which warm up
    (level,) = await _measure(behaviour, concurrency=(2,), requests=4, level_limit_s=0.3)
    assert (level.completed, level.unfinished) == (0, 4)
    assert notes([level]) == ["2 at once: 4 requests were cut off by the time limit"]


async def test_a_server_that_refuses_everything_is_one_error() -> None:
    with pytest.raises(StartupFailed, match="a first request failed: HTTP 418: told to fail"):
        await _measure(FakeBehaviour(fails_with=418))


async def test_no_server_is_one_error() -> None:
    plan = BenchPlan(url="http://127.0.0.1:9")
    with pytest.raises(StartupFailed, match=r"/v1/models gives no model \(ConnectError"):
        await anext(measure(plan))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"url": "localhost:8000"}, "URL must start with http"),
        ({"concurrency": (8, 0)}, "at least 1, not [8, 0]"),
        ({"concurrency": ()}, "at least 1, not []"),
        ({"rate": 0.0}, "rate must be above 0"),
        ({"input_len": 0}, "input_len must be at least 1, not 0"),
        ({"output_len": -1}, "output_len must be at least 1, not -1"),
        ({"requests": 0}, "requests must be at least 1, not 0"),
        ({"level_limit_s": 0}, "time limits must be above 0 s"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfig, match=re.escape(message)):
        BenchPlan(**{"url": "http://x", **settings})


async def test_what_the_server_says_of_its_workers_is_shown() -> None:
    seconds = [{"wait": 1.0, "forward": 9.0}, {"wait": 2.0, "forward": 12.0}]
    with serve_fake(FakeBehaviour(worker_seconds=seconds)) as url:
        plan = BenchPlan(url=url, concurrency=(1,), requests=2)
        levels = [level async for _, level in measure(plan)]
    assert levels[0].worker_wait_share == 0.25
    assert table("fake-model", plan, levels).columns[-1].header == "wait"
    assert "workers waited for the driver" in notes(levels)[-1]


async def test_the_report_has_every_level() -> None:
    with serve_fake(FakeBehaviour()) as url:
        plan = BenchPlan(url=url, concurrency=(1, 2), requests=2, input_len=8, output_len=3, seed=5)
        levels = [level async for _, level in measure(plan)]
    assert table("fake-model", plan, levels).row_count == 2
    report = as_json("fake-model", plan, levels)
    assert (report["seed"], report["model"], report["output_len"]) == (5, "fake-model", 3)
    assert [level["completed"] for level in report["levels"]] == [2, 2]
    assert set(report["levels"][0]["ttft_ms"]) == {"median", "p99"}
