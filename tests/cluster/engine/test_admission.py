"""What can never fit is refused with the numbers; who is turned away learns how long to wait."""

import pytest

from cluster.engine.admission import QueuePace, max_total_tokens
from cluster.engine.config import EngineConfig
from cluster.engine.executor import Capacity
from cluster.errors import InvalidConfig, InvalidRequest
from tests.cluster.engine.rig import make_request

CONFIG = EngineConfig(max_model_len=100)
AMPLE = Capacity(64, 16)
TIGHT = Capacity(4, 16)  # 64 slots


def test_a_sequence_may_fill_the_context_and_the_pool_to_the_last_token() -> None:
    assert max_total_tokens(make_request("r", 60, 40), CONFIG, AMPLE) == 100
    assert max_total_tokens(make_request("r", 60, 5), CONFIG, TIGHT) == 65  # the last token needs no slot
    assert max_total_tokens(make_request("r", 60, None), CONFIG, AMPLE) == 100
    assert max_total_tokens(make_request("r", 60, None), CONFIG, TIGHT) == 65


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "capacity", "field", "message"),
    [
        (60, 41, AMPLE, "max_tokens", r"60 tokens.*\(41\) are 101 tokens together.*may have 100"),
        (60, 6, TIGHT, "max_tokens", r"66 tokens together: the whole KV cache holds 64 tokens"),
        (100, None, AMPLE, "prompt", r"prompt has 100 tokens.*may have 100"),
        (65, 1, TIGHT, "prompt", r"prompt has 65 tokens.*KV cache holds 64"),
        (0, 5, AMPLE, "prompt", r"at least one token"),
    ],
)
def test_what_cannot_fit(
    prompt: int, max_tokens: int | None, capacity: Capacity, field: str, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        max_total_tokens(make_request("r", prompt, max_tokens), CONFIG, capacity)
    assert caught.value.field == field


def test_retry_after_follows_the_pace_within_bounds() -> None:
    pace = QueuePace()
    assert pace.retry_after_s(100, now=0.0) == 1.0
    for second in range(10):
        pace.note_starts(1, now=float(second))
    assert pace.retry_after_s(10, now=10.0) == 5.0
    assert pace.retry_after_s(1, now=10.0) == 1.0
    assert pace.retry_after_s(10_000, now=10.0) == 30.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 0}, "max_model_len must be at least 1, not 0"),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 7}, r"\(7\) must be at least max_num_seqs \(8\)"),
        ({"max_steps_in_flight": 3}, "1 or 2, not 3"),
        ({"step_deadline_s": 0.0}, "step_deadline_s must be above 0"),
    ],
)
def test_limits_that_cannot_be(settings: dict[str, float], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        EngineConfig(**{"max_model_len": 10, **settings})  # type: ignore[arg-type]
