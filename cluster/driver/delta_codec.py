"""The bytes of a subscription: what a driver tells an ingress, one msgpack message a step.

Knows token deltas and who sends them; knows nothing of Serve, queues or text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, assert_never

import msgpack

from cluster.errors import Unavailable
from cluster.generation import FinishReason, TokenDelta, TokenLogprob

_VERSION = 2

_PackedLogprob = tuple[int, float, list[list[Any]]]


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message: requests live as long as the lease they were submitted under, no longer."""

    lease_id: str


@dataclass(frozen=True, slots=True)
class Deltas:
    """All that one subscriber's requests gained since the last message."""

    deltas: tuple[TokenDelta, ...]


@dataclass(frozen=True, slots=True)
class Closed:
    """The last message of a subscription: why this driver makes no more tokens."""

    error: str


DriverMessage = Hello | Deltas | Closed


def encode(message: DriverMessage) -> bytes:
    match message:
        case Hello(lease_id):
            body: list[object] = ["hello", lease_id]
        case Deltas(deltas):
            body = ["deltas", _pack_deltas(deltas)]
        case Closed(error):
            body = ["closed", error]
        case _:
            assert_never(message)
    packed: bytes = msgpack.packb(body)
    return bytes([_VERSION]) + packed


def decode(data: bytes) -> DriverMessage:
    """Raises `Unavailable` when the driver speaks another version: a rolling update is under way."""
    if data[0] != _VERSION:
        raise Unavailable(f"the driver speaks version {data[0]} of the subscription, this ingress {_VERSION}")
    kind, content = msgpack.unpackb(memoryview(data)[1:])
    match kind:
        case "hello":
            return Hello(content)
        case "deltas":
            return Deltas(tuple(_unpack_delta(*fields) for fields in content))
        case "closed":
            return Closed(content)
        case _:
            raise Unavailable(f"the driver sent a message of an unknown kind: {kind!r}")


def _pack_deltas(deltas: Sequence[TokenDelta]) -> list[tuple[object, ...]]:
    return [
        (
            d.request_id,
            d.choice,
            d.token_ids,
            d.finish_reason and d.finish_reason.value,
            d.error,
            d.num_cached_tokens,
            [_pack_logprob(logprob) for logprob in d.logprobs],
            None if d.prompt_logprobs is None else [_pack_logprob(logprob) for logprob in d.prompt_logprobs],
        )
        for d in deltas
    ]


def _pack_logprob(logprob: TokenLogprob | None) -> tuple[object, ...] | None:
    return None if logprob is None else (logprob.token_id, logprob.logprob, logprob.top)


def _unpack_delta(
    request_id: str,
    choice: int,
    token_ids: list[int],
    finish_reason: str | None,
    error: str | None,
    num_cached_tokens: int,
    logprobs: list[_PackedLogprob],
    prompt_logprobs: list[_PackedLogprob | None] | None,
) -> TokenDelta:
    return TokenDelta(
        request_id,
        choice,
        tuple(token_ids),
        None if finish_reason is None else FinishReason(finish_reason),
        error,
        tuple(map(_unpack_logprob, logprobs)),
        None
        if prompt_logprobs is None
        else tuple(fields and _unpack_logprob(fields) for fields in prompt_logprobs),
        num_cached_tokens,
    )


def _unpack_logprob(fields: _PackedLogprob) -> TokenLogprob:
    token_id, logprob, top = fields
    return TokenLogprob(token_id, logprob, tuple((other, value) for other, value in top))
