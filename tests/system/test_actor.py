"""The Ray actor around a worker: answering while it runs, known to have died."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.fakes.worker_configs import tiny_worker_config
from tests.system.conftest import Served
from tests.system.processes import all_of, wait_until
from workers.actor import WorkerActor
from workers.channel import DriverChannel
from workers.protocol import NewSequence, SamplingSettings, SequenceId, StepPlan, StepResult
from workers.reports import CodeIdentity

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]  # the first one starts Ray

DEADLINE_S = 150.0


@pytest.fixture
def actors(served: Served, counter_path: Path) -> Iterator[list[Any]]:
    """Two, on the shared Ray, beside those that serve."""
    others = all_of("ray::WorkerActor")
    config = tiny_worker_config(counter_path, 2)
    actor_class: Any = WorkerActor  # `ray.remote` is not annotated
    actors = [actor_class.options(num_cpus=0).remote(rank, config) for rank in range(2)]
    yield actors
    for actor in actors:
        ray.kill(actor)
    wait_until(lambda: all_of("ray::WorkerActor") == others, "these actors have ended")


def call_all(actors: list[Any], method: str, *arguments: Any) -> list[Any]:
    answers: list[Any] = ray.get(
        [getattr(actor, method).remote(*arguments) for actor in actors], timeout=DEADLINE_S
    )
    return answers


def test_two_actors_count_answer_while_they_run_and_are_known_to_have_died(actors: list[Any]) -> None:
    identities = call_all(actors, "identify")
    mine = CodeIdentity.of_this_process()
    assert [mine.difference(identity.code, same_node=True) for identity in identities] == [None, None]
    [address] = call_all(actors[:1], "open_group", True)
    assert call_all(actors, "join_group", address) == ["shared memory"] * 2
    call_all(actors, "load")
    call_all(actors, "allocate", 8)
    driver = DriverChannel(2, 0, send_deadline_s=DEADLINE_S)
    runs = [actor.run.remote(endpoint) for actor, endpoint in zip(actors, driver.endpoints, strict=True)]
    greedy = SamplingSettings(temperature=0.0, top_k=0, top_p=1.0, seed=0, choice=0)
    driver.send(StepPlan(0, 0, new=(NewSequence(SequenceId(1), (65,), 1, greedy, (0,), 0, 1),)))
    result = driver.receive(DEADLINE_S)
    assert isinstance(result, StepResult)
    assert result.outputs[0].token_ids == (66,)

    assert [identity.pid for identity in call_all(actors, "identify")] == [identity.pid for identity in identities]
    os.kill(identities[1].pid, signal.SIGKILL)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(runs[1], timeout=DEADLINE_S)
    call_all(actors[:1], "stop")
    assert "a stop was asked for" in ray.get(runs[0], timeout=DEADLINE_S)
    driver.close()
