"""The wire format: every message comes back equal, and whatever is not one of ours is refused by name."""

import struct
from dataclasses import replace

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.codec import decode, encode
from workers.errors import ProtocolError
from workers.protocol import (
    PROTOCOL_VERSION,
    Adjustments,
    KnownSequence,
    Logprobs,
    Message,
    NewSequence,
    SamplingSettings,
    SequenceId,
    SequenceOutput,
    StepFailure,
    StepPlan,
    StepResult,
    StepTimings,
    StopWorkers,
)

VERSION = bytes([PROTOCOL_VERSION])

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
ids = u64.map(SequenceId)
numbers = st.floats(allow_nan=False)
ints = st.lists(u32, max_size=8).map(tuple)

adjustments = st.builds(
    Adjustments,
    logit_bias=st.lists(st.tuples(u32, numbers), max_size=4).map(tuple),
    repetition_penalty=numbers,
    presence_penalty=numbers,
    frequency_penalty=numbers,
    allowed_token_ids=st.none() | ints,
    min_tokens=u64,
    stop_token_ids=ints,
    bad_words=st.lists(ints, max_size=3).map(tuple),
)
sampling = st.builds(
    SamplingSettings,
    temperature=numbers,
    top_k=u64,
    top_p=numbers,
    seed=u64,
    choice=u32,
    min_p=numbers,
    adjustments=st.none() | adjustments,
    logprobs=st.none() | st.integers(0, 127),
    prompt_logprobs=st.none() | st.integers(0, 127),
)
new_sequences = st.builds(
    NewSequence,
    sequence_id=ids,
    token_ids=ints,
    num_prompt_tokens=u32,
    sampling=sampling,
    blocks=ints,
    num_computed_tokens=u32,
    num_new_tokens=u32,
)
known_sequences = st.builds(KnownSequence, sequence_id=ids, num_new_tokens=u32, new_blocks=ints)
plans = st.builds(
    StepPlan,
    incarnation=u64,
    step=u64,
    new=st.lists(new_sequences, max_size=4).map(tuple),
    known=st.lists(known_sequences, max_size=6).map(tuple),
    ended=st.lists(ids, max_size=4).map(tuple),
)
floats = st.floats(allow_nan=False, width=32)


@st.composite
def logprobs(draw: st.DrawFn) -> Logprobs:
    count, num_top = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    return Logprobs(
        draw(u64),
        tuple(draw(floats) for _ in range(count)),
        num_top,
        tuple(draw(u32) for _ in range(count * num_top)),
        tuple(draw(floats) for _ in range(count * num_top)),
    )


outputs = st.builds(
    SequenceOutput,
    sequence_id=ids,
    token_ids=ints,
    logprobs=st.none() | logprobs(),
    prompt_logprobs=st.none() | logprobs(),
)
results = st.builds(
    StepResult,
    incarnation=u64,
    step=u64,
    outputs=st.lists(outputs, max_size=6).map(tuple),
    timings=st.builds(StepTimings, numbers, numbers, numbers, numbers, numbers),
)
failures = st.builds(
    StepFailure, incarnation=u64, step=st.integers(-1, 2**63), rank=u32, message=st.text(), traceback=st.text()
)
messages = st.one_of(plans, results, failures, st.builds(StopWorkers, incarnation=u64))

PLAN = StepPlan(
    incarnation=2,
    step=7,
    new=(NewSequence(SequenceId(9), (1, 2, 3), 3, SamplingSettings(0.5, 0, 0.9, 2**63 + 1, 1), (4, 5), 0, 3),),
    known=(KnownSequence(SequenceId(1), 1), KnownSequence(SequenceId(2), 1, (17,))),
    ended=(SequenceId(3),),
)
RESULT = StepResult(
    2, 7, (SequenceOutput(SequenceId(1), (5,)), SequenceOutput(SequenceId(2), (6, 7))), StepTimings(1.0)
)
FAILURE = StepFailure(2, 7, 1, "ValueError: no", "Traceback ...")


ADJUSTED = replace(
    PLAN,
    new=(
        replace(
            PLAN.new[0],
            sampling=replace(
                PLAN.new[0].sampling,
                adjustments=Adjustments(
                    logit_bias=((3, -1.5),), allowed_token_ids=(3, 4), bad_words=((5, 6), (7,))
                ),
                prompt_logprobs=2,
            ),
        ),
    ),
)
SCORED = replace(
    RESULT,
    outputs=(
        SequenceOutput(SequenceId(1), (), prompt_logprobs=Logprobs(1, (-0.5, -2.0), 1, (7, 8), (-0.25, -1.0))),
        SequenceOutput(SequenceId(2), (6,), logprobs=Logprobs(4, (-0.125,))),
    ),
)


@given(messages)
def test_every_message_comes_back_equal(message: Message) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize("message", [PLAN, ADJUSTED, RESULT, SCORED, FAILURE, StopWorkers(2)])
def test_values_come_back_with_their_types(message: Message) -> None:
    again = decode(encode(message))
    assert repr(again) == repr(message)


def test_the_version_is_the_first_byte() -> None:
    assert encode(StopWorkers(0))[0] == PROTOCOL_VERSION


def test_another_version_is_refused_with_both_numbers() -> None:
    with pytest.raises(ProtocolError, match=f"version {PROTOCOL_VERSION + 1}.*version {PROTOCOL_VERSION}"):
        decode(bytes([PROTOCOL_VERSION + 1]) + encode(PLAN)[1:])


@pytest.mark.parametrize("tag", [0, 99, -1, "plan", True, None, 1.0])
def test_an_unknown_tag_is_refused_by_name(tag: object) -> None:
    with pytest.raises(ProtocolError, match=f"unknown tag {tag!r}"):
        decode(VERSION + msgpack.packb([tag, 1, 2]))


@pytest.mark.parametrize("fields", [{}, 5, [], "text", None])
def test_a_message_without_fields_is_refused(fields: object) -> None:
    with pytest.raises(ProtocolError, match="no sequence of fields"):
        decode(VERSION + msgpack.packb(fields))


@pytest.mark.parametrize("message", [PLAN, RESULT, FAILURE], ids=lambda m: type(m).__name__)
def test_a_missing_or_surplus_field_is_refused_and_the_message_named(message: Message) -> None:
    fields = msgpack.unpackb(encode(message)[1:])
    for wrong in (fields[:-1], [*fields, 0]):
        with pytest.raises(ProtocolError, match=type(message).__name__):
            decode(VERSION + msgpack.packb(wrong))


@pytest.mark.parametrize("message", [PLAN, RESULT, FAILURE, StopWorkers(2)], ids=lambda m: type(m).__name__)
def test_a_field_of_another_type_is_refused(message: Message) -> None:
    fields = msgpack.unpackb(encode(message)[1:])
    for position in range(1, len(fields)):
        for wrong in (None, 1.5, {"a": 1}, True):
            changed = [*fields[:position], wrong, *fields[position + 1 :]]
            with pytest.raises(ProtocolError, match=type(message).__name__):
                decode(VERSION + msgpack.packb(changed))


@pytest.mark.parametrize("message", [PLAN, ADJUSTED, RESULT, SCORED, FAILURE, StopWorkers(2)])
def test_every_truncation_is_refused(message: Message) -> None:
    data = encode(message)
    for length in range(len(data)):
        with pytest.raises(ProtocolError):
            decode(data[:length])
    with pytest.raises(ProtocolError):
        decode(data + b"\0")


@given(st.binary(max_size=64), st.booleans())
def test_garbage_is_a_message_or_a_protocol_error(data: bytes, with_version: bool) -> None:
    try:
        message = decode(VERSION + data if with_version else data)
    except ProtocolError:
        return
    assert decode(encode(message)) == message


@given(messages, st.data())
def test_a_changed_byte_is_a_message_or_a_protocol_error(message: Message, data: st.DataObject) -> None:
    encoded = bytearray(encode(message))
    position = data.draw(st.integers(0, len(encoded) - 1))
    encoded[position] ^= data.draw(st.integers(1, 255))
    try:
        decode(bytes(encoded))
    except ProtocolError:
        return


@pytest.mark.parametrize("index", [-1, 2, 10**30])
def test_new_blocks_of_no_known_sequence_are_refused(index: int) -> None:
    fields = msgpack.unpackb(encode(PLAN)[1:])
    fields[6] = [(min(index, 2**63), struct.pack("<I", 1))]
    with pytest.raises(ProtocolError, match="StepPlan"):
        decode(VERSION + msgpack.packb(fields))


@pytest.mark.parametrize("column", [6, 7])
@pytest.mark.parametrize("index", [-1, 2, 2**63])
def test_log_probabilities_of_no_output_are_refused(column: int, index: int) -> None:
    fields = msgpack.unpackb(encode(RESULT)[1:])
    fields[column] = [(index, (0, b"", 0, b"", b""))]
    with pytest.raises(ProtocolError, match="StepResult"):
        decode(VERSION + msgpack.packb(fields))


@pytest.mark.parametrize("num_top", [0, 2])
def test_alternatives_that_do_not_add_up_are_refused(num_top: int) -> None:
    fields = msgpack.unpackb(encode(SCORED)[1:])
    fields[7][0][1][2] = num_top
    with pytest.raises(ProtocolError, match=f"2 tokens with {num_top} alternatives each"):
        decode(VERSION + msgpack.packb(fields))


def test_adjustments_that_nobody_asks_for_cost_one_byte() -> None:
    adjusted = replace(PLAN.new[0], sampling=replace(PLAN.new[0].sampling, adjustments=Adjustments()))
    fields = msgpack.unpackb(encode(PLAN)[1:])
    assert fields[3][0][4] is None
    assert len(encode(replace(PLAN, new=(adjusted,)))) > len(encode(PLAN)) + 30


@pytest.mark.parametrize(
    "message",
    [
        replace(PLAN, known=(KnownSequence(SequenceId(-1), 1),)),
        replace(PLAN, known=(KnownSequence(SequenceId(1), 2**32),)),
        replace(PLAN, incarnation=2**64),
        replace(RESULT, outputs=(SequenceOutput(SequenceId(1), (-5,)),)),
        replace(RESULT, outputs=(SequenceOutput(SequenceId(1), (5,), Logprobs(0, (), 1, (2**32,), (0.0,))),)),
    ],
)
def test_a_number_that_does_not_fit_is_refused_when_encoding(message: Message) -> None:
    with pytest.raises(ProtocolError, match=f"cannot encode {type(message).__name__}"):
        encode(message)


def test_text_that_is_not_unicode_still_travels() -> None:
    message = decode(encode(replace(FAILURE, message="file \udcff is gone")))
    assert isinstance(message, StepFailure)
    assert "is gone" in message.message
