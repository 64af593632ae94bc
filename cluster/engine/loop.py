"""The engine: one thread that turns requests into plans and results into tokens, however often the ranks are lost.

Synchronous inside; `submit`, `abort`, `finish_choice`, `prove`, `stats`, `drain` and `stop` may be called from any
thread. Knows requests and an executor; knows nothing of text, HTTP, Ray or torch.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import assert_never

from cluster.engine.admission import QueuePace, max_total_tokens
from cluster.engine.config import EngineConfig
from cluster.engine.core import EngineCore
from cluster.engine.executor import Executor, ExecutorFailed
from cluster.engine.outage import Outage
from cluster.engine.publishing import Publish, Publisher
from cluster.engine.recovery import RecoveryBudget, Restart
from cluster.engine.stats import EngineStats
from cluster.engine.suspects import OUT_FROM
from cluster.errors import InvalidRequest, Overloaded, Unavailable
from cluster.generation import FinishReason, GenerationRequest, TokenDelta

_CLOSE_DEADLINE_S = 5.0  # for the last deltas to go out, and for the thread to end after its step

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _End:
    request_id: str
    choice: int | None  # None: all of them
    reason: FinishReason


_Command = GenerationRequest | _End


class Engine:
    """Takes over `executor`: it is stopped when the engine's thread ends.

    Every choice of an accepted request gets exactly one delta with a finish reason, whatever happens. When the
    ranks are lost, they are restarted and every request goes on to the tokens it would have had. `publish` is
    called from one thread of its own, once a step with all of the step's deltas, in order (less often when it is
    slow, twice when an abort comes in); it can neither end nor delay the loop.
    """

    def __init__(
        self,
        executor: Executor,
        config: EngineConfig,
        publish: Publish,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._executor = executor
        self._config = config
        self._capacity = executor.capacity
        self._clock = clock
        self._core = EngineCore(executor, config, clock)
        self._publisher = Publisher(publish)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._outbox: list[TokenDelta] = []  # of this turn; the thread's own
        self._budget = RecoveryBudget(config.max_recoveries, config.recovery_window_s)  # likewise
        self._outage: Outage | None = None  # set by the thread
        self._wake = threading.Condition()  # guards everything below
        self._commands: list[_Command] = []
        self._applying: list[_Command] = []  # taken by the turn that runs, and not in `_stats` yet
        self._num_waiting = 0  # requests not yet started, queued commands included
        self._accepted: set[str] = set()  # ids of requests not yet finished
        self._pace = QueuePace()
        self._stats = self._core.stats()
        self._failure: str | None = None
        self._refusal: str | None = "the engine has not started"  # why new requests are refused
        self._proof_wanted = False
        self._stopping = False

    @property
    def failure(self) -> str | None:
        """Why no token can be made any more; None while the engine is well or recovers."""
        return self._failure

    @property
    def unavailable_because(self) -> str | None:
        """Why no token can be made now; None from the first step after a failure on."""
        outage = self._outage
        if self._failure is not None:
            return self._failure
        if outage is not None and not outage.has_stepped:
            return f"recovering: {outage.cause}"
        return self._core.lateness.cause

    def start(self) -> None:
        with self._wake:
            self._refusal = "the engine has stopped" if self._stopping else None
        self._publisher.start()
        self._thread.start()

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request. Raises `InvalidRequest`, `Overloaded` or `Unavailable`; then nothing was queued."""
        max_total_tokens(request, self._config, self._capacity)
        with self._wake:
            if self._refusal is not None:
                raise Unavailable(self._refusal)
            if request.request_id in self._accepted:
                raise InvalidRequest(f"request {request.request_id!r} is running already", "request_id")
            num_waiting, limit = self._num_waiting - self._num_free_seats(), self._config.max_waiting_requests
            if num_waiting >= limit:
                retry_after_s = self._pace.retry_after_s(num_waiting, self._clock())
                raise Overloaded(f"{num_waiting} requests wait already, and the limit is {limit}", retry_after_s)
            self._accepted.add(request.request_id)
            self._num_waiting += 1
            self._commands.append(request)
            self._wake.notify_all()

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """End a request, or one choice of it, before the next step is planned. Unknown ids are ignored."""
        self._end(_End(request_id, choice, FinishReason.ABORT))

    def finish_choice(self, request_id: str, choice: int) -> None:
        """The same for a choice that has stopped: its text met a stop string."""
        self._end(_End(request_id, choice, FinishReason.STOP))

    def prove(self) -> None:
        """Somebody suspects the ranks: run a step now, not at the next heartbeat."""
        with self._wake:
            self._proof_wanted = True
            self._wake.notify_all()

    def stats(self) -> EngineStats:
        """A consistent snapshot, as of the last turn of the loop and with what was submitted since."""
        with self._wake:
            unseen = [c for c in self._applying + self._commands if isinstance(c, GenerationRequest)]
            num_choices = sum(request.sampling.n for request in unseen)
            return replace(
                self._stats,
                received=self._stats.received + num_choices,
                waiting=self._stats.waiting + num_choices,
                waiting_requests=self._stats.waiting_requests + len(unseen),
                prompt_tokens=self._stats.prompt_tokens + sum(len(r.prompt_token_ids) for r in unseen),
            )

    def drain(self, deadline_s: float) -> bool:
        """Refuse new requests and wait until the running ones have finished. Whether they all did."""
        with self._wake:
            self._refusal = self._refusal or "the engine is draining"
            return self._wake.wait_for(lambda: not self._accepted, deadline_s)

    def stop(self) -> None:
        """End the loop after the step it is in; what still runs gets an ERROR delta. Idempotent."""
        with self._wake:
            self._refusal = self._refusal or "the engine has stopped"
            self._stopping = True
            started = self._thread.ident is not None
            self._wake.notify_all()
        if not started:
            self._executor.stop()
            return
        self._thread.join(self._config.step_deadline_s + 2 * _CLOSE_DEADLINE_S)
        if self._thread.is_alive():
            _log.error("the engine's thread did not end by its deadline")

    def _end(self, command: _End) -> None:
        with self._wake:
            if command.request_id in self._accepted:
                self._commands.append(command)
                self._wake.notify_all()

    def _run(self) -> None:
        reason = "the engine was stopped before the request had finished"
        try:
            while (commands := self._next_commands()) is not None:
                try:
                    self._turn(commands)
                except ExecutorFailed as failure:
                    self._recover(failure)
        except Exception as error:
            reason = self._give_up(error)
        finally:
            self._close(reason)

    def _next_commands(self) -> list[_Command] | None:
        """What was asked since the last turn. An idle engine sleeps here, a heartbeat interval at the most.

        None when it is time to end.
        """
        with self._wake:
            if self._core.idle and self._outage is None:
                self._wait(lambda: self._proof_wanted)
            self._proof_wanted = False
            return None if self._stopping else self._take_commands()

    def _wait(self, over: Callable[[], bool]) -> None:
        """Sleep until something is asked or `over`. Holds `_wake`."""
        self._wake.wait_for(lambda: self._commands or self._stopping or over(), self._config.heartbeat_interval_s)

    def _take_commands(self) -> list[_Command]:
        commands, self._commands = self._commands, []
        self._applying += commands
        return commands

    def _turn(self, commands: list[_Command]) -> None:
        self._apply(commands)
        if self._core.idle and not commands:
            self._core.heartbeat()
        planned = self._core.plan_step()
        if commands:
            self._hand_over()  # who came and who left shows before the step is waited for
        self._outbox += self._core.finish_step(planned)
        self._hand_over()
        if self._outage is not None and self._stats.steps > self._outage.num_steps:
            self._note_step_in(self._outage)

    def _apply(self, commands: list[_Command]) -> None:
        for command in commands:
            match command:
                case GenerationRequest():
                    self._core.add(command)
                case _End(request_id, choice, reason):
                    self._outbox += self._core.end(request_id, choice, reason)
                case _:
                    assert_never(command)

    def _num_free_seats(self) -> int:
        """How many of those not yet started the next turn may start. A turn that left some waiting had no more."""
        stats = self._stats
        return 0 if stats.waiting else max(0, self._config.max_num_seqs - stats.running)

    def _hand_over(self) -> None:
        """Show the outside what a turn has brought: counts first, then tokens."""
        deltas, self._outbox = self._outbox, []
        finished = {delta.request_id for delta in deltas if delta.finish_reason is not None}
        stats = self._core.stats()
        with self._wake:
            self._pace.note_starts(stats.started_requests - self._stats.started_requests, self._clock())
            self._stats = stats
            self._applying = []
            queued = sum(isinstance(command, GenerationRequest) for command in self._commands)
            self._num_waiting = stats.waiting_requests + queued
            if finished:
                self._accepted -= {request_id for request_id in finished if request_id not in self._core}
                self._wake.notify_all()
        if deltas:
            self._publisher.put(deltas)

    def _recover(self, failure: ExecutorFailed) -> None:
        """Decide what a failure of the ranks does: they are restarted, and every live request goes on from the
        tokens it has. Raises the last failure when they do not come back within the budget.
        """
        outage = self._begin_outage(failure)
        while True:
            pause_s = self._budget.take(self._clock())
            if pause_s is None:
                raise ExecutorFailed(f"{failure} ({self._budget.spent()})")
            restart = Restart(self._executor, pause_s, self._wake_up)
            if not self._restarted(restart):
                return  # `_next_commands` ends the loop
            if restart.error is None:
                break
            if not isinstance(restart.error, ExecutorFailed):
                raise restart.error
            failure = restart.error
            outage.cause = str(failure)
            _log.error("the ranks did not come back: %s", failure)
        outage.restarted(self._clock(), restart.parts)
        self._core.resume()

    def _begin_outage(self, failure: ExecutorFailed) -> Outage:
        """Or go on with the present one, when no token has gone out since."""
        now, stats = self._clock(), self._core.stats()
        last_step_at = stats.last_step_at if stats.steps else now
        outage = self._outage or Outage(str(failure), last_step_at, now, stats.generation_tokens, stats.steps)
        outage.lose_again(str(failure), stats.steps)
        self._outage = outage
        self._core.lose_ranks()
        if ends := self._core.end_suspects(str(failure)):
            outage.found_cause = True
            self._outbox += ends
        self._hand_over()
        _log.error("the worker group failed, and %d sequences wait for it: %s", self._stats.waiting, failure)
        return outage

    def _restarted(self, restart: Restart) -> bool:
        """Let `restart` run, and meanwhile take what is asked. False when the engine is to stop."""
        restart.start()
        while not restart.done:
            with self._wake:
                self._wait(lambda: restart.done)
                if self._stopping:
                    break
                commands = self._take_commands()
            self._apply(commands)
            self._hand_over()
        if self._stopping:
            restart.cancel(_CLOSE_DEADLINE_S)
            return False
        return True

    def _wake_up(self) -> None:
        with self._wake:
            self._wake.notify_all()

    def _note_step_in(self, outage: Outage) -> None:
        """From its first step on health is true again; it is over when its clients see that."""
        if not outage.has_stepped:
            outage.has_stepped = True
            self._budget.note_step()
            if outage.found_cause:
                self._budget.give_back(OUT_FROM)
        if self._stats.generation_tokens > outage.num_tokens or self._core.idle:
            report = outage.report(self._stats.last_step_at)
            _log.info("the worker group is back after %s", report)
            self._core.note_outage(report)
            self._outage = None
            self._hand_over()

    def _give_up(self, error: Exception) -> str:
        """The engine ends. Returns what every live request is told."""
        if isinstance(error, ExecutorFailed):
            _log.error("the worker group is given up: %s", error)
            reason = f"the worker group failed: {error}"
        else:
            _log.exception("the engine failed", exc_info=error)
            reason = f"the engine failed: {type(error).__name__}: {error}"
        self._failure = reason
        return reason

    def _close(self, reason: str) -> None:
        """Give every live request its end, and free the ranks. Nothing is accepted from here on."""
        try:
            with self._wake:
                self._refusal = self._failure or "the engine has stopped"
                commands = self._take_commands()
            self._apply(commands)
            self._outbox += self._core.fail_all(reason)
            self._hand_over()
        finally:
            self._publisher.close(_CLOSE_DEADLINE_S)
            self._executor.stop()
