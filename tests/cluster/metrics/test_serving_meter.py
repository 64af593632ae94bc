"""What clients wait for, on a clock that the test turns."""

import pytest

from cluster.generation import FinishReason, GenerationRequest, SamplingParams
from cluster.metrics.serving_meter import ServingMeter
from cluster.text.completer import Completer
from tests.fakes.byte_tokenizer import ByteTokenizer
from tests.fakes.scripted_source import ScriptedSource, says


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_first_and_later_tokens_are_told_apart_by_choice() -> None:
    clock = Clock()
    meter = ServingMeter(clock)
    watch = meter.watch()
    for now, choice in ((0.5, 0), (0.6, 1), (0.7, 0), (1.0, 1)):
        clock.now = now
        watch.gained(choice, 1)
    clock.now = 1.5
    watch.finished()

    stats = meter.snapshot()
    assert (stats.first_token.count, stats.first_token.total) == (1, 0.5)
    assert stats.next_token.count == 2
    assert stats.next_token.total == pytest.approx(0.2 + 0.4)
    assert (stats.request.count, stats.request.total) == (1, 1.5)
    assert stats.completion_tokens == 4


def test_what_bills_nothing_is_no_token() -> None:
    meter = ServingMeter()
    meter.watch().gained(0, 0)
    stats = meter.snapshot()
    assert (stats.first_token.count, stats.completion_tokens) == (0, 0)


def request(**sampling: object) -> GenerationRequest:
    params = SamplingParams(max_tokens=30, **sampling)  # type: ignore[arg-type]
    return GenerationRequest("r", (65,), params)


async def test_a_completer_counts_what_it_bills_and_nothing_after_a_stop_string() -> None:
    completer = Completer(ByteTokenizer(), None, ScriptedSource(says("one two three"), burst=5), 256)
    completion = await completer.complete(request(stop=("two",)))

    stats = completer.meter.snapshot()
    assert completion.choices[0].finish_reason is FinishReason.STOP
    assert stats.completion_tokens == completion.num_completion_tokens == len("one two")
    assert (stats.first_token.count, stats.next_token.count, stats.request.count) == (1, 1, 1)


async def test_a_client_that_leaves_has_had_what_it_was_handed() -> None:
    completer = Completer(ByteTokenizer(), None, ScriptedSource(), 256)
    stream = completer.stream(request())
    first = await anext(stream)
    await stream.aclose()

    stats = completer.meter.snapshot()
    assert stats.completion_tokens == len(first.token_ids) == 1
    assert stats.request.count == 0
