"""Everything that can be wrong with a request is found before the engine sees it, with field and numbers."""

from collections.abc import Callable
from typing import Any

import pytest

from cluster.errors import ContextOverflow, InvalidRequest
from cluster.generation import RequestOptions, SamplingParams
from cluster.text.chat_template import ChatTemplate
from cluster.text.prompts import Prompt, PromptEncoder
from tests.fakes.byte_tokenizer import BOS_ID, CHAT_TEMPLATE, SPECIAL_TOKENS, ByteTokenizer


def encoder(*, bos: bool = True, template: bool = True, max_model_len: int = 16) -> PromptEncoder:
    chat_template = ChatTemplate(CHAT_TEMPLATE, SPECIAL_TOKENS) if template else None
    return PromptEncoder(ByteTokenizer(bos=bos), chat_template, max_model_len, vocab_size=260)


def test_a_raw_prompt_gets_the_tokenizers_bos_and_ids_are_taken_as_they_are() -> None:
    assert encoder().encode("ab") == (BOS_ID, 97, 98)
    assert encoder().encode([97, 98]) == (97, 98)


def test_a_conversation_has_exactly_one_bos() -> None:
    ids = encoder().encode_chat([{"role": "user", "content": "hi"}])
    assert ids.count(BOS_ID) == 1
    assert ids[0] == BOS_ID


@pytest.mark.parametrize("prompt", ["", [], ()])
def test_an_empty_prompt_is_refused_where_the_tokenizer_adds_nothing(prompt: Prompt) -> None:
    with pytest.raises(InvalidRequest, match="at least one token") as refusal:
        encoder(bos=False).encode(prompt)
    assert refusal.value.field == "prompt"


def test_an_empty_text_is_a_bos_where_the_tokenizer_adds_one() -> None:
    assert encoder(bos=True).encode("") == (BOS_ID,)


@pytest.mark.parametrize("stranger", [-1, 260, 2**31])
def test_ids_outside_the_vocabulary(stranger: int) -> None:
    with pytest.raises(InvalidRequest, match=f"{stranger} at position 1.*between 0 and 259") as refusal:
        encoder().encode([1, stranger])
    assert refusal.value.field == "prompt"


@pytest.mark.parametrize("stranger", [-1, 260, 2**31])
@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("stop_token_ids", lambda token_id: (token_id,)),
        ("allowed_token_ids", lambda token_id: (token_id,)),
        ("logit_bias", lambda token_id: ((token_id, 1.0),)),
    ],
)
def test_parameters_with_ids_outside_the_vocabulary(
    field: str, values: Callable[[int], tuple[Any, ...]], stranger: int
) -> None:
    with pytest.raises(InvalidRequest, match=f"{field} .*{stranger}") as refusal:
        encoder().check("r", (1,), SamplingParams(**{field: values(stranger)}))  # type: ignore[arg-type]
    assert refusal.value.field == field
    assert encoder().check("r", (1,), SamplingParams(**{field: values(259)}))  # type: ignore[arg-type]


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="lone surrogate at position 1"):
        encoder().encode("a\ud800")


def test_max_tokens_is_what_is_left_of_the_context() -> None:
    assert encoder().check("r", (1,) * 10, SamplingParams()).sampling.max_tokens == 6
    assert encoder().check("r", (1,) * 10, SamplingParams(max_tokens=6)).sampling.max_tokens == 6
    assert encoder().check("r", (1,) * 10, SamplingParams(), default_max_tokens=4).sampling.max_tokens == 4
    assert encoder().check("r", (1,) * 10, SamplingParams(), default_max_tokens=99).sampling.max_tokens == 6


@pytest.mark.parametrize("size", [16, 17])
def test_a_prompt_that_fills_the_context(size: int) -> None:
    with pytest.raises(ContextOverflow, match=rf"prompt has {size} tokens.*16 tokens") as refusal:
        encoder().check("r", (1,) * size, SamplingParams())
    assert refusal.value.field == "prompt"


def test_prompt_and_output_beyond_the_context() -> None:
    with pytest.raises(ContextOverflow, match=r"10 tokens and max_tokens is 7, together 17.*16 tokens") as refusal:
        encoder().check("r", (1,) * 10, SamplingParams(max_tokens=7))
    assert refusal.value.field == "max_tokens"


def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded() -> None:
    class Unasked(ByteTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
            raise AssertionError("encoded")

    unasked = PromptEncoder(Unasked(), ChatTemplate(CHAT_TEMPLATE, SPECIAL_TOKENS), 16, vocab_size=260)
    with pytest.raises(ContextOverflow, match=r"prompt has 113 bytes.*at least 17 tokens.*16 tokens") as refusal:
        unasked.encode("a" * 113)  # its longest token is <start>: 7 bytes
    assert refusal.value.field == "prompt"
    with pytest.raises(ContextOverflow, match=r"messages has 1\d\d bytes") as refusal:
        unasked.encode_chat([{"role": "user", "content": "\u6f22" * 38}])
    assert refusal.value.field == "messages"
    with pytest.raises(AssertionError, match="encoded"):
        unasked.encode("a" * 112)


def test_chat_needs_a_template_and_messages() -> None:
    with pytest.raises(InvalidRequest, match="no chat template") as refusal:
        encoder(template=False).encode_chat([{"role": "user", "content": "hi"}])
    assert refusal.value.field == "messages"
    with pytest.raises(InvalidRequest, match="at least one message"):
        encoder().encode_chat([])


def test_bad_words_are_encoded_as_they_are_and_after_a_space() -> None:
    class Words(ByteTokenizer):
        """A word after a space is one token, as in most vocabularies."""

        def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
            return (200,) if text == " hi" else super().encode(text, add_special_tokens=add_special_tokens)

    sampling = SamplingParams(bad_words=("hi", "no"))
    assert encoder().check("r", (1,), sampling).bad_words_ids == ((104, 105), (110, 111))
    request = PromptEncoder(Words(), None, 16, vocab_size=260).check("r", (1,), sampling)
    assert request.bad_words_ids == ((104, 105), (200,), (110, 111))


def test_bad_words_that_are_no_tokens_or_unknown_ones() -> None:
    class Deaf(ByteTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
            return ()

    with pytest.raises(InvalidRequest, match=r"bad_words\[0\] must have at least one token"):
        PromptEncoder(Deaf(), None, 16, vocab_size=260).check("r", (1,), SamplingParams(bad_words=("x",)))
    with pytest.raises(InvalidRequest, match=r"bad_words\[1\] has token id 120 at position 0.*between 0 and 99"):
        PromptEncoder(ByteTokenizer(), None, 16, vocab_size=100).check(
            "r", (1,), SamplingParams(bad_words=("A", "x"))
        )
    with pytest.raises(InvalidRequest, match=r"bad_words\[0\] is not valid Unicode"):
        encoder().check("r", (1,), SamplingParams(bad_words=("\ud800",)))


def test_min_tokens_beyond_what_is_left() -> None:
    with pytest.raises(InvalidRequest, match=r"min_tokens must be at most max_tokens \(6\), not 7"):
        encoder().check("r", (1,) * 10, SamplingParams(min_tokens=7))


def test_options_reach_the_request() -> None:
    request = encoder().check("r", (1,), SamplingParams(), options=RequestOptions(priority=-3, cache_salt="me"))
    assert (request.priority, request.cache_salt) == (-3, "me")


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"priority": 2**31}, "priority"),
        ({"priority": -(2**31)}, "priority"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "x" * 257}, "cache_salt"),
        ({"cache_salt": "a\ud800"}, "cache_salt"),
    ],
)
def test_options_out_of_range(wrong: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        RequestOptions(**wrong)
    assert refusal.value.field == field
