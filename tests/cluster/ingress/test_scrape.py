"""GET /metrics: what a scraper gets while requests run, and when there is no driver to ask."""

from collections.abc import Mapping

from cluster.engine.stats import EngineStats
from cluster.generation import FinishReason
from tests.cluster.ingress.served import CHAT, app_over, chat, http
from tests.fakes.scrapes import Scraped
from tests.fakes.scripted_source import ScriptedSource, says

ZEROS = dict.fromkeys(FinishReason, 0)


async def stats() -> Mapping[str, EngineStats]:
    return {"d1": EngineStats(running=1, received=4, finished={**ZEROS, FinishReason.STOP: 3})}


async def test_a_scrape_has_the_engines_snapshots_and_the_ingress_own() -> None:
    async with http(app_over(ScriptedSource(says("yes")), engine_stats=stats)) as client:
        answer = (await client.post(CHAT, json=chat())).json()
        response = await client.get("/metrics")

    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain")
    scraped = Scraped.of(response.text)
    scraped.check_conservation()
    assert scraped.received == 4
    assert scraped["shardserve_completion_tokens_total"] == answer["usage"]["completion_tokens"] == 4
    assert scraped["shardserve_time_to_first_token_seconds_count"] == 1
    assert scraped.by_label("shardserve_build_info", "version") == {"1.2.3": 1}
    assert scraped["shardserve_available"] == 1


async def test_openmetrics_is_given_where_it_is_asked_for() -> None:
    async with http(app_over(ScriptedSource(), engine_stats=stats)) as client:
        response = await client.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    assert response.text.endswith("# EOF\n")


async def test_without_a_driver_the_rest_is_still_told() -> None:
    app = app_over(ScriptedSource(), unavailable_because=lambda: "the replica is gone")
    async with http(app) as client:
        response = await client.get("/metrics")

    scraped = Scraped.of(response.text)
    assert response.status_code == 200
    assert scraped["shardserve_available"] == 0
    assert "shardserve_requests_received_total" not in scraped
