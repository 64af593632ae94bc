"""Who may come in: what can never fit, and how long to stay away when the queue is full.

Knows lengths, blocks and rates; knows nothing of the sequences that run, text or HTTP.
"""

from collections import deque

from cluster.engine.config import EngineConfig
from cluster.engine.executor import Capacity
from cluster.errors import InvalidRequest
from cluster.generation import GenerationRequest

_MIN_RETRY_S = 1.0
_MAX_RETRY_S = 30.0


def max_total_tokens(request: GenerationRequest, config: EngineConfig, capacity: Capacity) -> int:
    """How many tokens each choice may have, prompt included. Raises `InvalidRequest` for what cannot fit.

    The last token of a sequence is never computed, so it needs no slot.
    """
    num_prompt_tokens = len(request.prompt_token_ids)
    slots = capacity.num_blocks * capacity.block_size
    limit = min(config.max_model_len, slots + 1)
    if num_prompt_tokens == 0:
        raise InvalidRequest("prompt must have at least one token", "prompt")
    if num_prompt_tokens >= limit:
        raise InvalidRequest(
            f"prompt has {num_prompt_tokens} tokens, which leaves no room for an answer: "
            + _limits(config, slots),
            "prompt",
        )
    max_tokens = request.sampling.max_tokens
    if max_tokens is None:
        return limit
    if num_prompt_tokens + max_tokens > limit:
        raise InvalidRequest(
            f"prompt ({num_prompt_tokens} tokens) and max_tokens ({max_tokens}) are "
            f"{num_prompt_tokens + max_tokens} tokens together: " + _limits(config, slots),
            "max_tokens",
        )
    return num_prompt_tokens + max_tokens


def _limits(config: EngineConfig, slots: int) -> str:
    if slots + 1 < config.max_model_len:
        return f"the whole KV cache holds {slots} tokens, so a sequence may have {slots + 1}"
    return f"a sequence may have {config.max_model_len}"


class QueuePace:
    """How fast waiting requests have been started lately."""

    def __init__(self) -> None:
        self._starts: deque[float] = deque(maxlen=64)

    def note_starts(self, count: int, now: float) -> None:
        self._starts.extend([now] * min(count, 64))

    def retry_after_s(self, num_waiting: int, now: float) -> float:
        """Seconds until about half of the queue has been started."""
        if not self._starts:
            return _MIN_RETRY_S
        interval = (now - self._starts[0]) / len(self._starts)
        return min(_MAX_RETRY_S, max(_MIN_RETRY_S, interval * num_waiting / 2))
