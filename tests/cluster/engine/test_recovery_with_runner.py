"""A real rank is lost every few steps: tokens, and log-probabilities to the last bit, are those undisturbed.

Penalties, masks, seeds, prompt log-probabilities, prefix hits and preemptions share the steps that are lost.
"""

import threading
from dataclasses import replace
from pathlib import Path

from cluster.engine.core import EngineCore
from cluster.generation import GenerationRequest, TokenDelta
from tests.cluster.engine.test_with_runner import checkpoint, deltas_of, demanding_requests, start

__all__ = ["checkpoint"]


def deltas_with_losses(
    core: EngineCore, asked: list[GenerationRequest], every: int
) -> dict[str, list[TokenDelta]]:
    """As `deltas_of`, but each `every`th step is lost with the ranks and all they hold."""
    deltas: dict[str, list[TokenDelta]] = {request.request_id: [] for request in asked}
    for request in asked:
        core.add(request)
    turns = 0
    while not core.idle:
        turns += 1
        planned = core.plan_step()
        if turns % every == 0:
            core.lose_ranks()
            core._executor.restart(threading.Event())
            core.resume()
            continue
        for delta in core.finish_step(planned):
            deltas[delta.request_id].append(replace(delta, num_cached_tokens=0))
    core.check_integrity()
    return deltas


def test_nothing_shows_that_ranks_were_lost(checkpoint: Path, depth: int) -> None:
    undisturbed = deltas_of(start(checkpoint, depth), demanding_requests())
    core = start(checkpoint, depth)
    assert deltas_with_losses(core, demanding_requests(), every=9) == undisturbed
    assert core.stats().recoveries > 5
