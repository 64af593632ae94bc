"""Everything that can be wrong with a request is found before the engine sees it, with field and numbers."""

import pytest

from cluster.errors import ContextOverflow, InvalidRequest
from cluster.generation import SamplingParams
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
    with pytest.raises(InvalidRequest, match=f"{stranger} at position 0") as refusal:
        encoder().check("r", (1,), SamplingParams(stop_token_ids=(stranger,)))
    assert refusal.value.field == "stop_token_ids"


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


def test_chat_needs_a_template_and_messages() -> None:
    with pytest.raises(InvalidRequest, match="no chat template") as refusal:
        encoder(template=False).encode_chat([{"role": "user", "content": "hi"}])
    assert refusal.value.field == "messages"
    with pytest.raises(InvalidRequest, match="at least one message"):
        encoder().encode_chat([])
