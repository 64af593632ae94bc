"""Our HTTP API as a function of this process: the same checks and the same bodies, without Serve or a network.

Knows the ASGI application and the driver behind it; knows nothing of files.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from cluster.config import ClusterConfig
from cluster.driver.connection import DriverConnection
from cluster.driver.driver import Driver
from cluster.engine.stats import EngineStats
from cluster.ingress.admission import Limits
from cluster.ingress.app import build_app
from cluster.llm import start_offline_group
from cluster.offline.batch import Answer
from cluster.text.chat_template import load_chat_template
from cluster.text.completer import Completer
from cluster.text.tokenizer import load_tokenizer


class HttpEndpoint:
    """Any ASGI application with OpenAI's routes, called without a network."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def post(self, url: str, body: dict[str, Any]) -> Answer:
        response = await self._client.post(url, json=body)
        answer = response.json()
        return Answer(response.status_code, str(answer.get("id", "")), answer)


@asynccontextmanager
async def open_endpoint(config: ClusterConfig) -> AsyncIterator[HttpEndpoint]:
    """Start the ranks of `config` and give the API to them; ends both. Raises `StartupFailed`."""
    with ExitStack() as taken:
        # When the group fails, requests are answered 503 and the batch ends by itself: nothing has to be killed.
        driver = Driver(config, lambda config: start_offline_group(config, taken), exit_process=lambda code: None)
        await driver.start()
        connection = DriverConnection(driver)
        try:
            connection.start()
            await connection.wait_connected(config.start_deadline_s)
            app = await _application(driver, connection, config.model_name)
            # No timeout: a request waits in the engine for as long as those before it take.
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://offline", timeout=None) as client:
                yield HttpEndpoint(client)
        finally:
            await connection.close()
            await driver.stop()


async def _application(driver: Driver, connection: DriverConnection, model_name: str) -> FastAPI:
    model = await driver.describe()
    path = Path(model.path)
    completer = Completer(
        load_tokenizer(path), load_chat_template(path), connection, model.max_model_len, model.vocab_size
    )
    return build_app(
        completer,
        model_name,
        lambda: connection.unavailable_because,
        engine_stats=lambda: _stats_of(driver),
        limits=Limits(allow_priority=True),  # whoever wrote the requests started this, too
        version=version("shardserve"),
    )


async def _stats_of(driver: Driver) -> Mapping[str, EngineStats]:
    return {"offline": await driver.stats()}
