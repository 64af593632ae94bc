"""Ray's errors as ours: what was lost may be tried again, the rest may not."""

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
from ray.serve.exceptions import RayServeException

from cluster.driver.handle import as_ours
from cluster.errors import GenerationFailed, Overloaded, Unavailable

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
