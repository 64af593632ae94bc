"""Messages to bytes and back: a version byte, then msgpack. No pickle, nothing that runs code.

Compact because every step crosses here twice: what a plan says of its known sequences, and a result of its
outputs, travels as columns of fixed-width numbers, and settings as fixed structs. Knows the messages of
`workers.protocol`; knows nothing of sockets.
"""

import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import Any, assert_never

import msgpack

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

_VERSION = bytes([PROTOCOL_VERSION])
_PLAN, _STOP, _RESULT, _FAILURE = 1, 2, 3, 4

# temperature, top_k, top_p, seed, choice, min_p, logprobs, prompt_logprobs; of the last two -1 is None
_SAMPLING = struct.Struct("<dQdQIdbb")
_PENALTIES = struct.Struct("<dddQ")  # repetition, presence, frequency, min_tokens
_TIMINGS = struct.Struct("<5d")
_MALFORMED = (ValueError, TypeError, LookupError, OverflowError, struct.error)  # UnicodeError is a ValueError


def encode(message: Message) -> bytes:
    """The bytes of `message`. Raises `ProtocolError` for a value that its field cannot carry."""
    try:
        packed: bytes = msgpack.packb(_to_fields(message), unicode_errors="backslashreplace")
    except _MALFORMED as error:
        raise ProtocolError(f"cannot encode {type(message).__name__}: {error}") from error
    return _VERSION + packed


def decode(data: bytes) -> Message:
    """The message in `data`. Raises `ProtocolError`, and nothing else, for bytes that hold none."""
    if not data:
        raise ProtocolError("an empty message")
    if data[0] != PROTOCOL_VERSION:
        raise ProtocolError(f"a message of protocol version {data[0]}, this end speaks version {PROTOCOL_VERSION}")
    try:
        fields = msgpack.unpackb(memoryview(data)[1:], use_list=False)
    except (*_MALFORMED, msgpack.UnpackException) as error:
        raise ProtocolError(f"a message that is not msgpack ({len(data)} bytes): {error}") from error
    if not isinstance(fields, tuple) or not fields:
        raise ProtocolError(f"a message that is no sequence of fields, but {type(fields).__name__}")
    tag, *values = fields
    if type(tag) is not int or tag not in _READERS:
        raise ProtocolError(f"a message with the unknown tag {tag!r:.40}")
    kind, read = _READERS[tag]
    try:
        return read(*values)
    except _MALFORMED as error:
        raise ProtocolError(f"a malformed {kind.__name__}: {error}") from error


def _to_fields(message: Message) -> tuple[Any, ...]:
    match message:
        case StepPlan():
            return (
                _PLAN,
                message.incarnation,
                message.step,
                [_new_to_fields(sequence) for sequence in message.new],
                _longs([known.sequence_id for known in message.known]),
                _ints([known.num_new_tokens for known in message.known]),
                [(i, _ints(known.new_blocks)) for i, known in enumerate(message.known) if known.new_blocks],
                _longs(message.ended),
            )
        case StopWorkers():
            return (_STOP, message.incarnation)
        case StepResult():
            timings = message.timings
            return (
                _RESULT,
                message.incarnation,
                message.step,
                _longs([output.sequence_id for output in message.outputs]),
                _ints([len(output.token_ids) for output in message.outputs]),
                _ints([token_id for output in message.outputs for token_id in output.token_ids]),
                [(i, _logprobs_to_fields(o.logprobs)) for i, o in enumerate(message.outputs) if o.logprobs],
                [
                    (i, _logprobs_to_fields(o.prompt_logprobs))
                    for i, o in enumerate(message.outputs)
                    if o.prompt_logprobs
                ],
                _TIMINGS.pack(timings.wait, timings.prepare, timings.forward, timings.collectives, timings.sample),
            )
        case StepFailure():
            return (
                _FAILURE,
                message.incarnation,
                message.step,
                message.rank,
                message.message,
                message.traceback,
            )
        case _:
            assert_never(message)


def _new_to_fields(sequence: NewSequence) -> tuple[Any, ...]:
    sampling = sequence.sampling
    return (
        sequence.sequence_id,
        _ints(sequence.token_ids),
        sequence.num_prompt_tokens,
        _SAMPLING.pack(
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            sampling.seed,
            sampling.choice,
            sampling.min_p,
            -1 if sampling.logprobs is None else sampling.logprobs,
            -1 if sampling.prompt_logprobs is None else sampling.prompt_logprobs,
        ),
        None if sampling.adjustments is None else _adjustments_to_fields(sampling.adjustments),
        _ints(sequence.blocks),
        sequence.num_computed_tokens,
        sequence.num_new_tokens,
    )


def _adjustments_to_fields(adjustments: Adjustments) -> tuple[Any, ...]:
    allowed = adjustments.allowed_token_ids
    return (
        _PENALTIES.pack(
            adjustments.repetition_penalty,
            adjustments.presence_penalty,
            adjustments.frequency_penalty,
            adjustments.min_tokens,
        ),
        _ints(token_id for token_id, _ in adjustments.logit_bias),
        _doubles(bias for _, bias in adjustments.logit_bias),
        None if allowed is None else _ints(allowed),
        _ints(adjustments.stop_token_ids),
        [_ints(word) for word in adjustments.bad_words],
    )


def _logprobs_to_fields(logprobs: Logprobs) -> tuple[Any, ...]:
    return (
        logprobs.start,
        _floats(logprobs.chosen),
        logprobs.num_top,
        _ints(logprobs.top_ids),
        _floats(logprobs.top),
    )


def _read_plan(
    incarnation: Any, step: Any, new: Any, known_ids: bytes, known_counts: bytes, known_blocks: Any, ended: bytes
) -> StepPlan:
    ids, counts = _read_longs(known_ids), _read_ints(known_counts)
    if len(ids) != len(counts):
        raise ValueError(f"{len(ids)} known sequences with {len(counts)} token counts")
    blocks: list[tuple[int, ...]] = [()] * len(ids)
    for index, packed in known_blocks:
        if index < 0:
            raise ValueError(f"new blocks for the known sequence number {index}")
        blocks[index] = _read_ints(packed)
    return StepPlan(
        incarnation=_integer(incarnation),
        step=_integer(step),
        new=tuple(_read_new(*sequence) for sequence in new),
        known=tuple(map(_known_sequence, ids, counts, blocks)),
        ended=tuple(map(SequenceId, _read_longs(ended))),
    )


@lru_cache(maxsize=4096)
def _known_sequence(sequence_id: int, num_new_tokens: int, blocks: tuple[int, ...]) -> KnownSequence:
    """Most known sequences say the same in every decode step: finding one is cheaper than building one."""
    return KnownSequence(SequenceId(sequence_id), num_new_tokens, blocks)


def _read_new(
    sequence_id: Any,
    token_ids: bytes,
    num_prompt_tokens: Any,
    sampling: bytes,
    adjustments: Any,
    blocks: bytes,
    num_computed_tokens: Any,
    num_new_tokens: Any,
) -> NewSequence:
    return NewSequence(
        sequence_id=SequenceId(_integer(sequence_id)),
        token_ids=_read_ints(token_ids),
        num_prompt_tokens=_integer(num_prompt_tokens),
        sampling=_read_sampling(sampling, adjustments),
        blocks=_read_ints(blocks),
        num_computed_tokens=_integer(num_computed_tokens),
        num_new_tokens=_integer(num_new_tokens),
    )


def _read_sampling(data: bytes, adjustments: Any) -> SamplingSettings:
    temperature, top_k, top_p, seed, choice, min_p, logprobs, prompt_logprobs = _SAMPLING.unpack(data)
    return SamplingSettings(
        temperature,
        top_k,
        top_p,
        seed,
        choice,
        min_p,
        None if adjustments is None else _read_adjustments(*adjustments),
        None if logprobs < 0 else logprobs,
        None if prompt_logprobs < 0 else prompt_logprobs,
    )


def _read_adjustments(
    penalties: bytes, bias_ids: bytes, biases: bytes, allowed: bytes | None, stop_token_ids: bytes, bad_words: Any
) -> Adjustments:
    repetition, presence, frequency, min_tokens = _PENALTIES.unpack(penalties)
    return Adjustments(
        logit_bias=tuple(zip(_read_ints(bias_ids), _read_doubles(biases), strict=True)),
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        allowed_token_ids=None if allowed is None else _read_ints(allowed),
        min_tokens=min_tokens,
        stop_token_ids=_read_ints(stop_token_ids),
        bad_words=tuple(map(_read_ints, bad_words)),
    )


def _read_stop(incarnation: Any) -> StopWorkers:
    return StopWorkers(_integer(incarnation))


def _read_result(
    incarnation: Any,
    step: Any,
    sequence_ids: bytes,
    counts: bytes,
    token_ids: bytes,
    logprobs: Any,
    prompt_logprobs: Any,
    timings: bytes,
) -> StepResult:
    ids, lengths, tokens = _read_longs(sequence_ids), _read_ints(counts), _read_ints(token_ids)
    ends = list(accumulate(lengths))
    if len(ids) != len(lengths) or (ends[-1] if ends else 0) != len(tokens):
        raise ValueError(f"{len(ids)} outputs with {len(lengths)} lengths for {len(tokens)} tokens")
    outputs = [
        SequenceOutput(SequenceId(sequence_id), tokens[end - length : end])
        for sequence_id, length, end in zip(ids, lengths, ends, strict=True)
    ]
    for index, found in _read_logprobs(logprobs):
        outputs[index] = replace(outputs[index], logprobs=found)
    for index, found in _read_logprobs(prompt_logprobs):
        outputs[index] = replace(outputs[index], prompt_logprobs=found)
    return StepResult(
        incarnation=_integer(incarnation),
        step=_integer(step),
        outputs=tuple(outputs),
        timings=StepTimings(*_TIMINGS.unpack(timings)),
    )


def _read_logprobs(fields: Any) -> Iterator[tuple[int, Logprobs]]:
    """The log-probabilities of some outputs, each with the index of its output."""
    for index, (start, chosen, num_top, top_ids, top) in fields:
        if index < 0:
            raise ValueError(f"log-probabilities of the output number {index}")
        found = Logprobs(
            _integer(start), _read_floats(chosen), _integer(num_top), _read_ints(top_ids), _read_floats(top)
        )
        if not len(found.chosen) * found.num_top == len(found.top_ids) == len(found.top):
            raise ValueError(
                f"{len(found.chosen)} tokens with {found.num_top} alternatives each, but {len(found.top_ids)} ids "
                f"and {len(found.top)} log-probabilities of alternatives"
            )
        yield index, found


def _read_failure(incarnation: Any, step: Any, rank: Any, message: Any, traceback: Any) -> StepFailure:
    return StepFailure(_integer(incarnation), _integer(step), _integer(rank), _text(message), _text(traceback))


_READERS: dict[int, tuple[type, Callable[..., Message]]] = {
    _PLAN: (StepPlan, _read_plan),
    _STOP: (StopWorkers, _read_stop),
    _RESULT: (StepResult, _read_result),
    _FAILURE: (StepFailure, _read_failure),
}


def _ints(values: Iterable[int]) -> bytes:
    values = tuple(values)
    return struct.pack(f"<{len(values)}I", *values)


def _longs(values: Iterable[int]) -> bytes:
    values = tuple(values)
    return struct.pack(f"<{len(values)}Q", *values)


def _floats(values: Iterable[float]) -> bytes:
    values = tuple(values)
    return struct.pack(f"<{len(values)}f", *values)


def _doubles(values: Iterable[float]) -> bytes:
    values = tuple(values)
    return struct.pack(f"<{len(values)}d", *values)


def _read_ints(data: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(data) // 4}I", data)


def _read_longs(data: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(data) // 8}Q", data)


def _read_floats(data: bytes) -> tuple[float, ...]:
    return struct.unpack(f"<{len(data) // 4}f", data)


def _read_doubles(data: bytes) -> tuple[float, ...]:
    return struct.unpack(f"<{len(data) // 8}d", data)


def _integer(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r:.40} where an integer belongs")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"{value!r:.40} where text belongs")
    return value
