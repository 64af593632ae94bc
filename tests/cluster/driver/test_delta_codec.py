"""Messages of a subscription survive the wire."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.driver.delta_codec import Closed, Deltas, DriverMessage, Hello, decode, encode
from cluster.errors import Unavailable
from cluster.generation import FinishReason, TokenDelta, TokenLogprob

_logprobs = st.builds(
    TokenLogprob,
    token_id=st.integers(0, 2**31),
    logprob=st.floats(allow_nan=False),
    top=st.lists(st.tuples(st.integers(0, 2**31), st.floats(allow_nan=False)), max_size=2).map(tuple),
)
_deltas = st.builds(
    TokenDelta,
    request_id=st.text(max_size=20),
    choice=st.integers(0, 127),
    token_ids=st.lists(st.integers(0, 2**31), max_size=5).map(tuple),
    finish_reason=st.none() | st.sampled_from(FinishReason),
    error=st.none() | st.text(max_size=20),
    logprobs=st.lists(_logprobs, max_size=3).map(tuple),
    prompt_logprobs=st.none() | st.lists(st.none() | _logprobs, max_size=3).map(tuple),
    num_cached_tokens=st.integers(0, 2**31),
)


@given(
    st.builds(Hello, st.text())
    | st.builds(Closed, st.none() | st.text())
    | st.builds(Deltas, st.lists(_deltas).map(tuple))
)
def test_round_trip(message: DriverMessage) -> None:
    assert decode(encode(message)) == message


def test_another_version_is_refused() -> None:
    data = encode(Hello("x"))
    with pytest.raises(Unavailable, match="version 9"):
        decode(bytes([9]) + data[1:])
