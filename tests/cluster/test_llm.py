"""`LLM` with one rank in this process, on the counter model."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from cluster.errors import ContextOverflow, InvalidConfig, InvalidRequest, StartupFailed
from cluster.generation import FinishReason, SamplingParams
from cluster.llm import LLM
from tests.fakes.checkpoints import write_counter_model, write_tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_counter_model(tmp_path_factory.mktemp("models") / "counter", cycle=range(32, 127))


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), device="cpu", kv_cache_memory="16MiB", max_num_seqs=16) as llm:
        yield llm


def test_a_batch_keeps_its_order(llm: LLM) -> None:
    starts = [chr(40 + i) for i in range(40)]

    completions = llm.generate(starts, SamplingParams(max_tokens=10))

    for start, completion in zip(starts, completions, strict=True):
        assert completion.text == "".join(chr(ord(start) + 1 + i) for i in range(10))
        assert completion.choices[0].finish_reason is FinishReason.LENGTH


def test_a_bare_prompt_is_text_or_token_ids(llm: LLM) -> None:
    assert [each.text for each in llm.generate("abc", SamplingParams(max_tokens=3))] == ["def"]
    assert [each.text for each in llm.generate([97, 98], SamplingParams(max_tokens=3))] == ["cde"]


def test_a_stop_string_ends_a_choice_and_frees_it(llm: LLM) -> None:
    (completion,) = llm.generate("abc", SamplingParams(max_tokens=200, stop=("hi",), n=2))

    assert [choice.text for choice in completion.choices] == ["defg", "defg"]
    assert {choice.stop_reason for choice in completion.choices} == {"hi"}


def test_a_conversation_may_be_given_bare(llm: LLM) -> None:
    message = {"role": "user", "content": "count"}
    bare = llm.chat([message], SamplingParams(max_tokens=4))
    many = llm.chat([[message], [message, message]], SamplingParams(max_tokens=4))
    assert [each.text for each in bare + many] == ['!"#$'] * 3


def test_leaving_a_stream_ends_its_request(llm: LLM) -> None:
    for delta in llm.stream("abc", SamplingParams(max_tokens=2000)):
        assert delta.text.startswith("d")
        break
    assert llm.generate("abc", SamplingParams(max_tokens=3))[0].text == "def"
    assert llm._engine.stats().finished[FinishReason.ABORT] >= 1  # commands apply in order: the abort came first
    assert llm._sinks == {}


def test_nothing_runs_when_one_prompt_is_wrong(model: Path) -> None:
    with LLM(str(model), device="cpu", kv_cache_memory="1MiB", max_model_len=64) as llm:
        with pytest.raises(InvalidRequest, match="at least one token"):
            llm.generate(["abc", ""])
        with pytest.raises(ContextOverflow, match="64 tokens"):
            llm.generate("x" * 64)
        assert llm._engine.stats().received == 0
        llm.close()


@pytest.mark.parametrize("vocab_size", [258, 300])
def test_the_models_own_vocabulary_counts(vocab_size: int, tmp_path: Path) -> None:
    """The tokenizer knows ids up to 259; what matters is which of them have an embedding."""
    model = write_tiny_llama(tmp_path / "model", vocab_size=vocab_size)
    with LLM(str(model), device="cpu", kv_cache_memory="1MiB", max_model_len=64) as llm:
        (completion,) = llm.generate([vocab_size - 1], SamplingParams(max_tokens=1))
        assert completion.num_completion_tokens == 1
        with pytest.raises(InvalidRequest, match=f"token id {vocab_size} .* between 0 and {vocab_size - 1}"):
            llm.generate([vocab_size])


def test_mistakes_in_settings_and_files(model: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="max_model_len is 5000, but the model has 4096 positions"):
        LLM(str(model), device="cpu", max_model_len=5000)
    with pytest.raises(InvalidConfig, match="max_model_len is 5000"):  # before Ray is started for two ranks
        LLM(str(model), tp=2, device="cpu", max_model_len=5000)
    with pytest.raises(StartupFailed, match="heads cannot be split over 90 ranks"):
        LLM(str(model), tp=90, device="cpu")
    assert not ray.is_initialized()
    with pytest.raises(StartupFailed, match="one sequence of max_model_len 4096 tokens needs 256 KV blocks"):
        LLM(str(model), device="cpu", max_model_len=4096, kv_cache_memory="10KiB")
    with pytest.raises(StartupFailed, match="no such file or folder"):
        LLM(str(tmp_path / "absent"), device="cpu")
