"""Ranges of sampling parameters: every refusal names its field and the value."""

from typing import Any

import pytest

from cluster.errors import InvalidRequest
from cluster.generation import SamplingParams

NAN = float("nan")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", -1),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", NAN),
        ("top_p", 0.0),
        ("top_p", NAN),
        ("top_k", -1),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 10.5),
        ("repetition_penalty", NAN),
        ("presence_penalty", -2.1),
        ("frequency_penalty", 2.1),
        ("min_tokens", -1),
        ("seed", -1),
        ("seed", 2**63),
        ("logprobs", -1),
        ("logprobs", 21),
        ("prompt_logprobs", 21),
        ("n", 0),
        ("n", 129),
        ("logit_bias", ((-1, 0.0),)),
        ("logit_bias", ((1, 100.5),)),
        ("logit_bias", ((1, NAN),)),
        ("logit_bias", tuple((token, 1.0) for token in range(1025))),
        ("allowed_token_ids", ()),
        ("allowed_token_ids", (3, -7)),
        ("stop_token_ids", (-2,)),
        ("stop", ("a", "")),
        ("stop", ("a",) * 17),
        ("bad_words", ("",)),
        ("bad_words", ("a",) * 129),
    ],
)
def test_out_of_range_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field} ") as refusal:
        SamplingParams(**{field: value})
    assert refusal.value.field == field


def test_min_tokens_may_not_exceed_max_tokens() -> None:
    SamplingParams(max_tokens=5, min_tokens=5)
    with pytest.raises(InvalidRequest, match=r"min_tokens must be at most max_tokens \(5\), not 6"):
        SamplingParams(max_tokens=5, min_tokens=6)


def test_the_ends_of_every_range_are_taken() -> None:
    SamplingParams(temperature=2, top_p=1, min_p=1, presence_penalty=-2, frequency_penalty=2, logprobs=20)
    SamplingParams(temperature=0, min_p=0, repetition_penalty=10, prompt_logprobs=0, logit_bias=((0, -100.0),))
