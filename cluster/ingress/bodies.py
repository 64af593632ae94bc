"""The bodies of requests, as OpenAI defines them, and what we take of them.

A parameter that we do not carry out is refused by its name, unless its value says that it is off, which clients
send as a matter of course. Knows JSON and parameters; knows nothing of tokens or streams.
"""

from codecs import BOM_UTF8
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails

from cluster.errors import InvalidRequest
from cluster.generation import MAX_LOGPROBS, RequestOptions, SamplingParams
from cluster.ingress import json_values as values
from cluster.ingress.rendering import AnswerForm

_VLLM_TOP_K_OFF = -1

Int = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Count = Annotated[int, Field(ge=1, lt=2**63)]
CountOrZero = Annotated[int, Field(ge=0, lt=2**63)]
Alternatives = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class StreamOptions(_Body):
    include_usage: bool | None = None
    include_obfuscation: Annotated[Any, values.only(False)] = None


class Message(_Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(values.content)]
    name: Annotated[Any, values.only()] = None
    refusal: Annotated[Any, values.only()] = None
    tool_calls: Annotated[Any, values.only([])] = None
    tool_call_id: Annotated[Any, values.only()] = None
    function_call: Annotated[Any, values.only()] = None
    audio: Annotated[Any, values.only()] = None
    annotations: Annotated[Any, values.only([])] = None
    reasoning: Annotated[Any, values.only()] = None
    reasoning_content: Annotated[Any, values.only()] = None

    def for_template(self) -> dict[str, str]:
        """OpenAI's `developer` is the newer name of `system`, which is the one that templates know."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content}


_SAMPLING_FIELDS = (  # those that mean in a body what they mean in `SamplingParams`
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "seed",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "n",
)


class GenerationBody(_Body):
    """What chat and completions share. `user` and the two keys are opaque to us, as they are by definition."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[tuple[tuple[int, float], ...] | None, BeforeValidator(values.logit_bias)] = None
    bad_words: tuple[str, ...] | None = None
    allowed_token_ids: tuple[Int, ...] | None = None
    seed: Int | None = None
    max_tokens: Count | None = None
    min_tokens: Int | None = None
    stop: Annotated[tuple[str, ...] | None, BeforeValidator(values.stop_strings)] = None
    stop_token_ids: tuple[Int, ...] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    n: Count | None = None
    priority: Int | None = None
    cache_salt: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    length_penalty: Annotated[Any, values.only(1)] = None
    best_of: Annotated[Any, values.only(1)] = None
    use_beam_search: Annotated[Any, values.only(False)] = None
    skip_special_tokens: Annotated[Any, values.only(True)] = None
    guided_json: Annotated[Any, values.only()] = None
    guided_regex: Annotated[Any, values.only()] = None
    guided_choice: Annotated[Any, values.only()] = None
    guided_grammar: Annotated[Any, values.only()] = None
    structured_outputs: Annotated[Any, values.only()] = None
    prompt_logprobs: Annotated[Any, values.only()] = None

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> "GenerationBody":
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is only allowed with stream=true", "stream_options")
        return self

    @property
    def form(self) -> AnswerForm:
        """How the answer is to be written."""
        include_usage = self.stream_options is not None and bool(self.stream_options.include_usage)
        return AnswerForm(stream=bool(self.stream), include_usage=include_usage)

    def options(self) -> RequestOptions:
        """Raises `InvalidRequest` for values out of range."""
        return RequestOptions(priority=self.priority or 0, cache_salt=self.cache_salt)

    def sampling(self) -> SamplingParams:
        """What was sent, and our defaults for the rest. Raises `InvalidRequest` for values out of range."""
        given: dict[str, Any] = {
            "max_tokens": self._max_tokens(),
            "top_k": 0 if self.top_k == _VLLM_TOP_K_OFF else self.top_k,
            "logprobs": self._num_logprobs(),
            "prompt_logprobs": self._num_prompt_logprobs(),
            **{name: getattr(self, name) for name in _SAMPLING_FIELDS},
        }
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})

    def _max_tokens(self) -> int | None:
        return self.max_tokens

    def _num_logprobs(self) -> int | None:
        return None

    def _num_prompt_logprobs(self) -> int | None:
        return None


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Annotated[values.Prompts, BeforeValidator(values.prompts)]
    max_tokens: CountOrZero | None = None  # 0, to score a prompt, only with echo
    echo: bool | None = None
    logprobs: Annotated[Alternatives | None, BeforeValidator(values.false_is_off)] = None
    suffix: Annotated[Any, values.only("")] = None

    @model_validator(mode="after")
    def _nothing_generated_needs_an_echo(self) -> "CompletionBody":
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequest("max_tokens must be at least 1, or 0 with echo=true", "max_tokens")
        return self

    @property
    def form(self) -> AnswerForm:
        return replace(super().form, logprobs=self.logprobs is not None, echo=bool(self.echo))

    def _num_logprobs(self) -> int | None:
        return self.logprobs

    def _num_prompt_logprobs(self) -> int | None:
        return self.logprobs if self.echo else None


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: tuple[Message, ...]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    response_format: Annotated[Any, values.only({"type": "text"})] = None
    tools: Annotated[Any, values.only([])] = None
    tool_choice: Annotated[Any, values.only("none", "auto")] = None  # without tools, both mean none
    parallel_tool_calls: bool | None = None  # says nothing where there are no tools
    functions: Annotated[Any, values.only([])] = None
    function_call: Annotated[Any, values.only("none")] = None
    modalities: Annotated[Any, values.only(["text"])] = None
    audio: Annotated[Any, values.only()] = None
    prediction: Annotated[Any, values.only()] = None
    reasoning_effort: Annotated[Any, values.only("none")] = None
    verbosity: Annotated[Any, values.only()] = None
    store: Annotated[Any, values.only(False)] = None
    metadata: Annotated[Any, values.only({})] = None
    service_tier: Annotated[Any, values.only("auto", "default")] = None
    web_search_options: Annotated[Any, values.only()] = None
    chat_template: Annotated[Any, values.only()] = None
    chat_template_kwargs: Annotated[Any, values.only({})] = None
    add_generation_prompt: Annotated[Any, values.only(True)] = None
    continue_final_message: Annotated[Any, values.only(False)] = None

    @model_validator(mode="after")
    def _alternatives_need_logprobs(self) -> "ChatBody":
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs is only allowed with logprobs=true", "top_logprobs")
        return self

    @property
    def form(self) -> AnswerForm:
        return replace(super().form, logprobs=bool(self.logprobs))

    def _num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def _max_tokens(self) -> int | None:
        older, newer = self.max_tokens, self.max_completion_tokens
        if older is not None and newer is not None and older != newer:
            raise InvalidRequest(
                f"max_completion_tokens ({newer}) and max_tokens ({older}) are two names of one limit and differ",
                "max_completion_tokens",
            )
        return older if newer is None else newer


class TokenizeBody(_Body):
    """POST /tokenize: a raw prompt, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: tuple[Message, ...] | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _one_of_two(self) -> "TokenizeBody":
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("send either prompt or messages", "prompt")
        return self


class DetokenizeBody(_Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: tuple[Int, ...]


BodyType = TypeVar("BodyType", bound=_Body)


def parse(kind: type[BodyType], body: bytes) -> BodyType:
    """Raises `InvalidRequest` that names the parameter and what is wrong with it."""
    try:
        return kind.model_validate_json(body.removeprefix(BOM_UTF8))  # which some editors put before JSON
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False)[0]) from None


def _refusal(problem: ErrorDetails) -> InvalidRequest:
    param = _path(problem["loc"])
    message = problem["msg"]
    match problem["type"]:
        case "json_invalid":
            return InvalidRequest(f"the body is not valid JSON: {message.removeprefix('Invalid JSON: ')}")
        case "missing":
            return InvalidRequest(f"{param} is required", param)
        case "extra_forbidden":
            return InvalidRequest(f"{param} is not a parameter we know or support", param)
        case "value_error":
            return InvalidRequest(f"{param} {problem['ctx']['error']}", param)
        case _:
            asked = message.replace("Input should", f"{param or 'the body'} must", 1)
            return InvalidRequest(f"{asked}, not {values.shown(problem['input'])}", param)


def _path(location: tuple[int | str, ...]) -> str | None:
    """("messages", 0, "content") -> messages[0].content"""
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return values.shortened(path.removeprefix(".")) or None
