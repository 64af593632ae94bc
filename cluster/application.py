"""The Serve application: an ingress that speaks HTTP and text, a driver that batches tokens, and their options.

`import_path: cluster.application:build`. Knows Serve's options and which part runs where; the parts themselves
know little of Serve. This module must not postpone annotations: Serve reads those of `build`.
"""

import asyncio
import importlib.metadata
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, nullcontext
from pathlib import Path
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError
from ray.serve import Application

from cluster.config import ClusterConfig
from cluster.driver.driver import Driver, GroupStarter
from cluster.driver.fleet import DriverFleet
from cluster.driver.handle import ServeDrivers
from cluster.driver.lifeline import LifelineServer
from cluster.driver.placement import STRATEGY, bundles_for, describe_demand, node_offers, offered_gpus
from cluster.driver.resolution import resolve_device
from cluster.driver.routing import ByAddress
from cluster.driver.status import DriverCard, ServedModel
from cluster.errors import ShardserveError, StartupFailed, Unavailable
from cluster.generation import Completion, GenerationRequest, RequestOptions, SamplingParams, TextDelta
from cluster.ingress.admission import Limits
from cluster.ingress.app import build_app
from cluster.launch import start_log
from cluster.launch.unplaced import UnplacedDrivers
from cluster.text.chat_template import ChatMessage, load_chat_template
from cluster.text.completer import Completer
from cluster.text.prompts import Prompt
from cluster.text.tokenizer import load_tokenizer
from model_shards.sources import resolve_model
from workers.device import visible_gpus

logger = logging.getLogger(__name__)

INGRESS = "Ingress"
DRIVER = "Driver"

_UNLIMITED = 10**6  # requests at once: the engine queues and refuses, Serve must not
_HEALTH_PERIOD_S = 2.0
_HEALTH_TIMEOUT_S = 10.0
_SHUTDOWN_LOOP_S = 0.2
_SHUTDOWN_MARGIN_S = 10.0  # for the ranks to end, once streams have
_CONSTRUCTOR_TRIES = 3
_SAY_WHY_S = 10.0  # a driver that is not there by now is worth a line in the log, and again each time


class DriverReplica(Driver):
    """The driver as Serve holds it. Its worker actors live in the replica's own placement group."""

    async def __init__(self, config: ClusterConfig) -> None:  # type: ignore[misc]  # Serve awaits it
        _log_to_stderr("driver")
        super().__init__(config, _group_starter())
        self._lifeline = LifelineServer(self)
        try:
            lifeline = await self._lifeline.open(_own_address())
        except OSError as error:
            raise StartupFailed(f"the driver cannot listen for its ingresses: {error}") from error
        try:
            with start_log.recording() if ray.is_initialized() else nullcontext():
                await self.start()
        except BaseException:
            await self._lifeline.close()
            raise
        self._card = DriverCard(_replica_id(), await self.describe(), lifeline)

    async def offer(self, subscriber_id: str, request: GenerationRequest) -> ShardserveError | None:
        """`submit`, with a refusal as the answer: Serve would log an exception with its traceback, each time."""
        try:
            await self.submit(subscriber_id, request)
        except ShardserveError as refusal:
            return refusal
        return None

    async def introduce(self) -> DriverCard:
        """For ingresses: who this is and how to reach it."""
        return self._card

    async def __del__(self) -> None:
        """Called by Serve once it sends nothing more. It knows only of its own calls, not of what they began."""
        await self.drain()
        await self.stop()
        await self._lifeline.close()


@serve.ingress()
class IngressReplica:
    """HTTP for clients outside, and the same completer for `Client` inside the cluster."""

    async def __init__(self, config: ClusterConfig, driver: Any) -> None:  # type: ignore[misc]  # as above
        _log_to_stderr("ingress")
        self._config = config
        self._fleet = DriverFleet(ServeDrivers(driver), config.model_name, explain=_placement_explainer())
        self._fleet.start()
        try:
            path = await asyncio.to_thread(resolve_model, config.model)
            tokenizer = await asyncio.to_thread(load_tokenizer, path)
            template = await asyncio.to_thread(load_chat_template, Path(path))
            model = await self._wait_for_driver()
        except BaseException:
            await self._fleet.close()
            raise
        self._completer = Completer(tokenizer, template, self._fleet, model.max_model_len, model.vocab_size)

    async def __serve_build_asgi_app__(self) -> FastAPI:
        return build_app(
            self._completer,
            self._config.model_name,
            lambda: self._fleet.unavailable_because,
            engine_stats=self._fleet.stats,
            limits=Limits(allow_priority=self._config.allow_priority),
            version=importlib.metadata.version("shardserve"),
        )

    async def __del__(self) -> None:
        """Called by Serve once the replica has drained."""
        await self._fleet.close()

    async def drain(self, deadline_s: float) -> bool:
        """Readiness off, nothing new, and wait for what runs. False when the deadline came first.

        For whoever is about to delete the application: new requests then get a 503 instead of Serve's own answer,
        and what still runs at the deadline ends with an error.
        """
        finished = await self._fleet.drain(deadline_s)
        if not finished:
            await self._fleet.close()
        return finished

    async def generate(
        self, prompt: Prompt, sampling: SamplingParams, options: RequestOptions | None = None
    ) -> Completion:
        request = await self._completer.prepare(_new_id(), prompt, sampling, options=options)
        return await self._completer.complete(request)

    async def chat(
        self, messages: Sequence[ChatMessage], sampling: SamplingParams, options: RequestOptions | None = None
    ) -> Completion:
        request = await self._completer.prepare_chat(_new_id(), messages, sampling, options)
        return await self._completer.complete(request)

    async def stream(
        self, prompt: Prompt, sampling: SamplingParams, options: RequestOptions | None = None
    ) -> AsyncIterator[TextDelta]:
        request = await self._completer.prepare(_new_id(), prompt, sampling, options=options)
        async with aclosing(self._completer.stream(request)) as deltas:
            async for delta in deltas:
                yield delta

    async def stream_chat(
        self, messages: Sequence[ChatMessage], sampling: SamplingParams, options: RequestOptions | None = None
    ) -> AsyncIterator[TextDelta]:
        request = await self._completer.prepare_chat(_new_id(), messages, sampling, options)
        async with aclosing(self._completer.stream(request)) as deltas:
            async for delta in deltas:
                yield delta

    async def _wait_for_driver(self) -> ServedModel:
        """Serve waits for a placement for ever and says nothing; this says why, and ends by the deadline."""
        device = resolve_device(
            self._config.device, ranks=self._config.tensor_parallel_size, count_gpus=offered_gpus
        )
        bundles = bundles_for(self._config.tensor_parallel_size, device)
        deadline = time.monotonic() + self._config.start_deadline_s
        while True:
            left_s = deadline - time.monotonic()
            try:
                return await self._fleet.wait_connected(max(0.0, min(_SAY_WHY_S, left_s)))
            except Unavailable:
                demand = describe_demand(bundles, await asyncio.to_thread(node_offers))
                if left_s <= _SAY_WHY_S:
                    message = f"no driver within {self._config.start_deadline_s:g} s: {demand}"
                    raise StartupFailed(message) from None
                logger.warning("no driver yet: it is being placed or loads its model; %s", demand)


def build(settings: ClusterConfig | dict[str, Any]) -> Application:
    """The application to `serve.run`, to deploy, or to bind into a larger graph.

    Raises `InvalidConfig` with one line for each mistake.
    """
    config = settings if isinstance(settings, ClusterConfig) else ClusterConfig.parse(settings)
    ranks = config.replicas * config.tensor_parallel_size
    count_gpus = offered_gpus if ray.is_initialized() else visible_gpus
    device = resolve_device(config.device, ranks=ranks, count_gpus=count_gpus)
    config = config.model_copy(update={"device": device})
    lifetime: dict[str, Any] = {
        "num_replicas": config.replicas,
        "ray_actor_options": {"num_cpus": 0},
        "max_ongoing_requests": _UNLIMITED,
        "health_check_period_s": _HEALTH_PERIOD_S,
        "health_check_timeout_s": _HEALTH_TIMEOUT_S,
        "graceful_shutdown_wait_loop_s": _SHUTDOWN_LOOP_S,
        "graceful_shutdown_timeout_s": config.drain_deadline_s + _SHUTDOWN_MARGIN_S,
        "max_constructor_retry_count": _CONSTRUCTOR_TRIES,
        "logging_config": {"enable_access_log": False},  # a line for each heartbeat otherwise
    }
    driver = serve.deployment(
        name=DRIVER,
        placement_group_bundles=bundles_for(config.tensor_parallel_size, device),
        placement_group_strategy=STRATEGY,
        request_router_config={"request_router_class": ByAddress},
        **lifetime,
    )(DriverReplica)
    ingress = serve.deployment(name=INGRESS, **lifetime)(IngressReplica)
    return ingress.bind(config, driver.bind(config))


def _own_address() -> str:
    """Where other processes of the cluster reach this one; in local testing mode there are none."""
    return str(ray.util.get_node_ip_address()) if ray.is_initialized() else "127.0.0.1"


def _replica_id() -> str:
    return str(serve.get_replica_context().replica_id.unique_id) if ray.is_initialized() else ""


def _placement_explainer() -> Callable[[], str | None]:
    """Says, each time, what place a driver of this application waits for."""
    if not ray.is_initialized():
        return lambda: None
    unplaced = UnplacedDrivers(serve.get_replica_context().app_name)

    def explain() -> str | None:
        try:
            unplaced.look()
        except (RayError, RuntimeError, OSError):  # Ray's own records cannot be read now
            return None
        return None if unplaced.demand is None else f"no place for it yet: {unplaced.demand}"

    return explain


def _group_starter() -> GroupStarter:
    """Ranks as actors; in Serve's local testing mode, where there is no Ray, one rank in this process."""
    if ray.is_initialized():
        from cluster.driver.ray_executor import start_ray_group

        return start_ray_group
    from cluster.driver.local_executor import start_local_group

    return start_local_group


def _log_to_stderr(name: str) -> None:
    """Serve sets up its own logger only; ours would be silent below WARNING."""
    logging.basicConfig(level=logging.INFO, format=f"[{name}] %(levelname)s %(name)s: %(message)s")


def _new_id() -> str:
    return f"py-{uuid.uuid4().hex}"
