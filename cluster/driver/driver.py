"""The driver: an engine and its worker group behind the few calls that an ingress makes.

Owns both for the life of its process, carries a step's deltas from the engine's publisher to its own event loop,
and ends the process when the engine has given the group up, so that Serve replaces it. Knows requests in tokens;
knows no text, HTTP or Ray: a plain class that Serve can hold.
"""

import asyncio
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from cluster.config import ClusterConfig
from cluster.driver.delta_codec import encode
from cluster.driver.status import DriverStatus, ServedModel
from cluster.driver.subscriptions import Subscriptions
from cluster.engine.config import EngineConfig
from cluster.engine.executor import Executor
from cluster.engine.loop import Engine
from cluster.engine.stats import EngineStats
from cluster.errors import Unavailable
from cluster.generation import GenerationRequest, TokenDelta

logger = logging.getLogger(__name__)

EXIT_CODE = 70  # of a driver whose group failed (EX_SOFTWARE)
_WATCH_S = 0.1
_FAREWELL_S = 0.5  # for the last messages to leave before the process ends
_STOP_S = 10.0
_DRAIN_POLL_S = 0.05  # between looks whether the last tokens have left
_SWITCH_INTERVAL_S = 0.0005  # the engine's thread and the loop share one GIL: +14% at 64 streams


@dataclass(frozen=True, slots=True)
class StartedGroup:
    """A worker group that is ready for its first step."""

    executor: Executor
    model: ServedModel
    failure: Callable[[], str | None]  # why its present life cannot go on, once anybody knows; None while it can


GroupStarter = Callable[[ClusterConfig], StartedGroup]


class Driver:
    """One served model. Await `start()` before anything else; every other call is made on the same event loop."""

    def __init__(
        self, config: ClusterConfig, start_group: GroupStarter, exit_process: Callable[[int], None] = os._exit
    ) -> None:
        self._config = config
        self._start_group = start_group
        self._exit_process = exit_process
        self._running = False

    async def start(self) -> None:
        """Bring up the group and the engine. Raises `StartupFailed`; the loop stays free meanwhile."""
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        self._loop = asyncio.get_running_loop()
        self._group = await asyncio.to_thread(self._start_group, self._config)
        self._engine = Engine(
            self._group.executor, engine_config(self._config, self._group.model), self._publish_from_engine
        )
        self._subscriptions = Subscriptions(self._engine.abort, time.monotonic)
        self._engine.start()
        self._watcher = asyncio.create_task(self._watch())
        self._running = True

    async def describe(self) -> ServedModel:
        return self._group.model

    async def subscribe(self, subscriber_id: str) -> AsyncIterator[bytes]:
        """All deltas of this subscriber's requests, one message a step."""
        async for message in self._subscriptions.stream(subscriber_id):
            yield encode(message)

    async def submit(self, subscriber_id: str, request: GenerationRequest) -> None:
        """Raises `Overloaded`, or `Unavailable` without a lease or an engine that goes on. While the ranks are
        restarted, requests wait.
        """
        self._subscriptions.own(subscriber_id, request.request_id, request.sampling.n)
        try:
            self._engine.submit(request)
        except BaseException:
            self._subscriptions.disown(request.request_id)
            raise

    async def abort(self, request_id: str) -> None:
        """Of a request whose client has gone."""
        self._subscriptions.disown(request_id)
        self._engine.abort(request_id)

    async def finish_choice(self, request_id: str, choice: int) -> None:
        """Of a choice whose text has met a stop string."""
        self._subscriptions.disown(request_id, choice)
        self._engine.finish_choice(request_id, choice)

    async def heartbeat(self, subscriber_id: str) -> DriverStatus:
        """Renew the lease; the answer says whether there was one, and how the driver is."""
        lease = self._subscriptions.renew(subscriber_id)
        stats = self._engine.stats()
        return DriverStatus(
            lease=lease,
            running=stats.running,
            waiting=stats.waiting,
            unavailable_because=self.unavailable_because,
        )

    def line_lost(self, subscriber_id: str) -> None:
        """An ingress's line has ended: it has died, or is about to come back."""
        self._subscriptions.line_lost(subscriber_id)

    async def stats(self) -> EngineStats:
        """What the engine has counted."""
        return self._engine.stats()

    async def check_health(self) -> None:
        """Serve's probe. Raises when no token can be made any more; a recovery is no reason to be replaced."""
        if self._engine.failure is not None:
            raise Unavailable(self._engine.failure)

    @property
    def unavailable_because(self) -> str | None:
        """Why no token can be made now: given up, recovering, or a death that the engine has not met yet."""
        return self._engine.unavailable_because or self._group.failure()

    async def drain(self) -> None:
        """Refuse what is new and wait, until the drain deadline, for every request to have ended and been sent."""
        if not self._running:
            return
        deadline = time.monotonic() + self._config.drain_deadline_s
        await asyncio.to_thread(self._engine.drain, self._config.drain_deadline_s)
        while not self._subscriptions.is_idle and time.monotonic() < deadline:
            await asyncio.sleep(_DRAIN_POLL_S)

    async def stop(self) -> None:
        """End the engine and the ranks; open requests end with an error. Idempotent."""
        if not self._running:
            return
        self._running = False
        self._watcher.cancel()
        self._subscriptions.close("the driver is shutting down")
        await asyncio.to_thread(self._engine.stop)

    def _publish_from_engine(self, deltas: Sequence[TokenDelta]) -> None:
        self._loop.call_soon_threadsafe(self._subscriptions.publish, deltas)

    async def _watch(self) -> None:
        while (failure := self._engine.failure) is None:
            if self._group.failure() is not None:
                self._engine.prove()  # an idle engine would hear of it at its next heartbeat
            await asyncio.sleep(_WATCH_S)
            for subscriber_id in self._subscriptions.expire():
                logger.warning("ingress %s is gone: its lease ran out and its requests are aborted", subscriber_id)
        await self._give_up(failure)

    async def _give_up(self, failure: str) -> None:
        """From here on a new replica is the way back."""
        logger.error("the worker group cannot go on, so this driver ends: %s", failure)
        self._subscriptions.close(failure)
        await asyncio.sleep(_FAREWELL_S)
        try:
            async with asyncio.timeout(_STOP_S):
                await asyncio.to_thread(self._engine.stop)
        finally:
            self._exit_process(EXIT_CODE)


def engine_config(config: ClusterConfig, model: ServedModel) -> EngineConfig:
    """The engine's limits: what the user asked for, with what the model and the KV pool allow."""
    return EngineConfig(
        max_model_len=model.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_waiting_requests=config.max_waiting_requests,
        max_steps_in_flight=config.max_steps_in_flight,
        prefix_cache=config.prefix_cache,
        step_deadline_s=config.step_deadline_s,
        max_recoveries=config.max_recoveries,
        recovery_window_s=config.recovery_window_s,
        eos_token_ids=model.eos_token_ids,
    )
