"""Ray's errors as ours: what was lost may be tried again, the rest may not. Calls keep apart."""

import contextvars
from typing import Any

import pytest
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    NodeDiedError,
    ObjectLostError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException

from cluster.driver.handle import AddressedDriver, ServeDrivers, as_ours
from cluster.driver.status import DriverCard, LifelineAddress
from cluster.errors import GenerationFailed, Overloaded, Unavailable
from cluster.generation import GenerationRequest, SamplingParams
from tests.cluster.driver.rig import MODEL

LOST = [
    ActorDiedError(),
    ActorUnavailableError("actor unavailable", b"1" * 16),
    NodeDiedError("node died"),
    WorkerCrashedError(),
    ObjectLostError("0" * 56, None, "call site"),
]


def task_error(cause: Exception) -> RayTaskError:
    return RayTaskError("submit", "a traceback", cause)


@pytest.mark.parametrize("error", [*LOST, RayServeException("no replica")])
def test_what_is_gone_is_unavailable_with_a_time_to_try_again(error: Exception) -> None:
    ours = as_ours(error)
    assert isinstance(ours, Unavailable)
    assert ours.retry_after_s > 0


@pytest.mark.parametrize("cause", LOST)
def test_a_far_end_that_met_a_loss_is_unavailable(cause: Exception) -> None:
    assert isinstance(as_ours(task_error(cause)), Unavailable)


def test_an_error_of_ours_comes_as_it_was_raised() -> None:
    refused = Overloaded("512 wait", 1.5)
    assert as_ours(task_error(refused)) is refused


@pytest.mark.parametrize("error", [task_error(KeyError("x")), RayError("strange")])
def test_anything_else_is_a_failure_of_the_generation(error: Exception) -> None:
    assert isinstance(as_ours(error), GenerationFailed)


class Broadcast:
    """A Serve handle whose replicas answer so."""

    def __init__(self, *answers: object, failure: Exception | None = None) -> None:
        self._answers = answers
        self._failure = failure

    def broadcast(self, method: str) -> "Broadcast":
        assert method == "introduce"
        return self

    async def results_async(self, **options: Any) -> list[object]:
        assert options["return_exceptions"]
        assert options["timeout_s"] > 0
        if self._failure is not None:
            raise self._failure
        return list(self._answers)


async def test_drivers_are_those_that_answer() -> None:
    card = DriverCard("a", MODEL, LifelineAddress("127.0.0.1", 1, "secret"))
    assert await ServeDrivers(Broadcast(ActorDiedError(), card)).find() == [card]


async def test_when_none_runs_there_is_none() -> None:
    gone = DeploymentUnavailableError.__new__(DeploymentUnavailableError)
    assert await ServeDrivers(Broadcast(failure=gone)).find() == []


@pytest.mark.parametrize("failure", [TimeoutError(), ActorUnavailableError("unavailable", b"1" * 16)])
async def test_who_runs_cannot_always_be_said(failure: Exception) -> None:
    with pytest.raises(Unavailable):
        await ServeDrivers(Broadcast(failure=failure)).find()


class Offering:
    """A Serve handle whose `offer` answers so."""

    def __init__(self, answer: Exception | None) -> None:
        self._answer = answer
        self.offered: list[tuple[str, GenerationRequest]] = []
        self.offer = self

    def options(self, **options: object) -> "Offering":
        return self

    async def remote(self, subscriber_id: str, request: GenerationRequest) -> Exception | None:
        self.offered.append((subscriber_id, request))
        return self._answer


async def test_a_refusal_is_an_answer_of_the_driver_and_an_error_here() -> None:
    card = DriverCard("a", MODEL, LifelineAddress("127.0.0.1", 1, "secret"))
    request = GenerationRequest("r", (1, 2), SamplingParams())
    taking = Offering(None)
    await AddressedDriver(taking, card).submit("me", request)
    assert taking.offered == [("me", request)]
    with pytest.raises(Overloaded, match="full"):
        await AddressedDriver(Offering(Overloaded("full", 2.0)), card).submit("me", request)


HTTP_REQUEST = contextvars.ContextVar("HTTP_REQUEST", default="none")


class Noting:
    """A Serve handle that notes for which HTTP request it is called, as Serve's own does."""

    def __init__(self) -> None:
        self.called_for: list[str] = []

    def options(self, **_: object) -> "Noting":
        return self

    @property
    def offer(self) -> "Noting":
        return self

    stats = offer

    async def remote(self, *_: object) -> None:
        self.called_for.append(HTTP_REQUEST.get())


async def test_a_call_carries_nothing_of_the_request_it_is_made_for() -> None:
    """Serve takes two calls at once for one request for the same, and sends one to the replica of the other."""
    handle = Noting()
    driver = AddressedDriver(handle, DriverCard("here", MODEL, LifelineAddress("127.0.0.1", 1, "secret")))
    HTTP_REQUEST.set("one")
    await driver.stats()
    await driver.submit("ingress", GenerationRequest("id", (1,), SamplingParams()))
    assert handle.called_for == ["none", "none"]
