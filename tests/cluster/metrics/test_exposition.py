"""Every family under its name, as a scraper of Prometheus reads it."""

from dataclasses import replace

from prometheus_client import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

from cluster.engine.stats import EngineStats
from cluster.generation import FinishReason
from cluster.metrics.exposition import EngineFamilies, IngressFamilies
from cluster.metrics.histogram import HistogramSnapshot
from cluster.metrics.serving_meter import ServingMeter
from tests.fakes.scrapes import Scraped
from workers.protocol import StepTimings

STATS = EngineStats(
    running=2,
    waiting=3,
    free_blocks=6,
    cached_blocks=4,
    total_blocks=10,
    received=15,
    finished={
        FinishReason.STOP: 4,
        FinishReason.LENGTH: 3,
        FinishReason.ABORT: 2,
        FinishReason.ERROR: 1,
    },
    preemptions=7,
    recoveries=1,
    outage_seconds=2.5,
    prompt_tokens=100,
    prefix_cache_queries=90,
    prefix_cache_hits=32,
    generation_tokens=50,
    step_seconds=HistogramSnapshot((0.01, 0.1), (5, 3, 1), 0.75),
    busy=StepTimings(wait=0.25, forward=0.5),
)


def test_the_engines_counts_have_their_names() -> None:
    scraped = Scraped.of(generate_latest(EngineFamilies({"d1": STATS})).decode())

    scraped.check_conservation()
    assert scraped.received == 15
    assert scraped.finished == {"stop": 4, "length": 3, "abort": 2, "error": 1}
    assert scraped.by_label("shardserve_kv_blocks", "state") == {"used": 4, "cached": 4, "free": 2}
    assert scraped.by_label("shardserve_worker_seconds_total", "part")["wait"] == 0.25
    expected = {
        "shardserve_requests_running": 2,
        "shardserve_requests_waiting": 3,
        "shardserve_preemptions_total": 7,
        "shardserve_recoveries_total": 1,
        "shardserve_outage_seconds_total": 2.5,
        "shardserve_prompt_tokens_total": 100,
        "shardserve_generation_tokens_total": 50,
        "shardserve_prefix_cache_queries_total": 90,
        "shardserve_prefix_cache_hits_total": 32,
        "shardserve_step_seconds_count": 9,
        "shardserve_step_seconds_sum": 0.75,
    }
    assert {name: scraped[name] for name in expected} == expected


def test_each_driver_has_its_own_series() -> None:
    other = replace(STATS, received=13, waiting=1)
    scraped = Scraped.of(generate_latest(EngineFamilies({"d1": STATS, "d2": other})).decode())
    scraped.check_conservation()
    assert scraped.by_label("shardserve_requests_received_total", "driver") == {"d1": 15, "d2": 13}
    assert scraped.finished["stop"] == 8


def test_without_a_driver_there_is_none() -> None:
    scraped = Scraped.of(generate_latest(EngineFamilies({})).decode())
    assert "shardserve_requests_received_total" not in scraped


def test_buckets_are_cumulative() -> None:
    scraped = Scraped.of(generate_latest(EngineFamilies({"d1": STATS})).decode())
    assert scraped.by_label("shardserve_step_seconds_bucket", "le") == {"0.01": 5, "0.1": 8, "+Inf": 9}


def test_an_ingress_speaks_for_itself_under_its_name() -> None:
    meter = ServingMeter()
    meter.watch().gained(0, 3)
    families = IngressFamilies(meter.snapshot(), ingress="i1", version="1.2", model="tiny", available=True)
    scraped = Scraped.of(generate_latest(families).decode())

    assert scraped["shardserve_available"] == 1
    assert scraped.by_label("shardserve_build_info", "model") == {"tiny": 1}
    assert scraped.by_label("shardserve_completion_tokens_total", "ingress") == {"i1": 3}
    assert scraped.by_label("shardserve_time_to_first_token_seconds_count", "ingress") == {"i1": 1}


def test_openmetrics_takes_every_family() -> None:
    ours = IngressFamilies(ServingMeter().snapshot(), ingress="i1", version="1", model="m", available=False)
    for families in (EngineFamilies({"d1": STATS}), ours):
        text = generate_openmetrics(families).decode()  # type: ignore[no-untyped-call]
        names = {family.name for family in parse_openmetrics(text)}  # type: ignore[no-untyped-call]
        assert all(name.startswith("shardserve_") for name in names)
        assert len(names) == len(list(families.collect()))
