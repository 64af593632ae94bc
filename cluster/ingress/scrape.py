"""GET /metrics: one snapshot of each engine and one of this ingress, in the format that the scraper asks for.

Whichever ingress a scrape comes to, the engines' part is what the drivers say. Knows snapshots and where they come
from; knows no metric's name.
"""

import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping

from prometheus_client import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from cluster.engine.stats import EngineStats
from cluster.metrics.exposition import EngineFamilies, IngressFamilies
from cluster.metrics.serving_meter import ServingMeter


class Scrape:
    """The route's handler. Drivers that do not answer are left out."""

    def __init__(
        self,
        engine_stats: Callable[[], Awaitable[Mapping[str, EngineStats]]],
        meter: ServingMeter,
        unavailable_because: Callable[[], str | None],
        *,
        version: str,
        model: str,
    ) -> None:
        self._engine_stats = engine_stats
        self._meter = meter
        self._unavailable_because = unavailable_because
        self._version = version
        self._model = model
        self._ingress = uuid.uuid4().hex[:8]

    async def answer(self, request: Request) -> Response:
        engines = EngineFamilies(await self._engine_stats())
        ingress = IngressFamilies(
            self._meter.snapshot(),
            ingress=self._ingress,
            version=self._version,
            model=self._model,
            available=self._unavailable_because() is None,
        )
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(_Together(engines, ingress)), headers={"content-type": content_type})


class _Together(Collector):
    def __init__(self, *collectors: Collector) -> None:
        self._collectors = collectors

    def collect(self) -> Iterator[Metric]:
        for collector in self._collectors:
            yield from collector.collect()
