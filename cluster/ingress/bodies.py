"""The bodies of requests, as OpenAI defines them, and what we take of them.

A parameter that we do not carry out is refused by its name, unless its value says that it is off, which clients
send as a matter of course. Knows JSON and parameters; knows nothing of tokens or streams.
"""

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails

from cluster.errors import InvalidRequest
from cluster.generation import SamplingParams

_SHOWN_CHARACTERS = 60  # of a wrong value, in the message about it
_VLLM_TOP_K_OFF = -1

Prompts = tuple[str | tuple[int, ...], ...]


def _only(*off: Any) -> AfterValidator:
    """For a parameter that is not supported yet: null and the values that turn it off pass."""

    def check(value: Any) -> Any:
        if value is not None and not any(_same(value, choice) for choice in off):
            instead = "".join(f" or send {json.dumps(choice)}" for choice in off[:1])
            raise ValueError(f"is not supported yet: leave it out{instead}")
        return value

    return AfterValidator(check)


def _same(value: Any, choice: Any) -> bool:
    """Equal as JSON has it, where false is not 0."""
    return isinstance(value, bool) == isinstance(choice, bool) and bool(value == choice)


def _stop_strings(value: Any) -> Any:
    """One string or several. A tuple, since what a validator returns is no longer a JSON array to pydantic."""
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def _prompts(value: Any) -> Prompts:
    """OpenAI's four shapes: a string, a list of strings, a list of token ids, a list of such lists."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise ValueError(f"must be a string, a list of strings, or token ids, not {_shown(value)}")
    if not value:
        raise ValueError("must not be an empty list")
    if _are_ids(value):
        return (tuple(value),)
    for position, item in enumerate(value):
        if not isinstance(item, str) and not (isinstance(item, list) and _are_ids(item)):
            raise ValueError(f"has {_shown(item)} at position {position}, which is neither text nor token ids")
    return tuple(item if isinstance(item, str) else tuple(item) for item in value)


def _are_ids(value: list[Any]) -> bool:
    return all(type(item) is int for item in value)


def _content(value: Any) -> Any:
    """Text, or a list of text parts, which are joined line by line."""
    if not isinstance(value, list):
        return value
    texts = []
    for position, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else part
            raise ValueError(f"has a part of type {_shown(kind)} at position {position}; only text is supported")
        if part.keys() != {"type", "text"} or not isinstance(part["text"], str):
            raise ValueError(f"has a text part at position {position} that is not just a string as `text`")
        texts.append(part["text"])
    return "\n".join(texts)


Int = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Count = Annotated[int, Field(ge=1, lt=2**63)]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class StreamOptions(_Body):
    include_usage: bool | None = None
    include_obfuscation: Annotated[Any, _only(False)] = None


class Message(_Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_content)]
    name: Annotated[Any, _only()] = None
    refusal: Annotated[Any, _only()] = None
    tool_calls: Annotated[Any, _only([])] = None
    tool_call_id: Annotated[Any, _only()] = None
    function_call: Annotated[Any, _only()] = None
    audio: Annotated[Any, _only()] = None
    annotations: Annotated[Any, _only([])] = None
    reasoning: Annotated[Any, _only()] = None
    reasoning_content: Annotated[Any, _only()] = None

    def for_template(self) -> dict[str, str]:
        """OpenAI's `developer` is the newer name of `system`, which is the one that templates know."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content}


class GenerationBody(_Body):
    """What chat and completions share. `user` and the two keys are opaque to us, as they are by definition."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    seed: Int | None = None
    max_tokens: Count | None = None
    stop: Annotated[tuple[str, ...] | None, BeforeValidator(_stop_strings)] = None
    stop_token_ids: tuple[Int, ...] | None = None
    ignore_eos: bool | None = None
    n: Count | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    frequency_penalty: Annotated[Any, _only(0)] = None
    presence_penalty: Annotated[Any, _only(0)] = None
    repetition_penalty: Annotated[Any, _only(1)] = None
    length_penalty: Annotated[Any, _only(1)] = None
    logit_bias: Annotated[Any, _only({})] = None
    min_p: Annotated[Any, _only(0)] = None
    min_tokens: Annotated[Any, _only(0)] = None
    best_of: Annotated[Any, _only(1)] = None
    echo: Annotated[Any, _only(False)] = None
    use_beam_search: Annotated[Any, _only(False)] = None
    skip_special_tokens: Annotated[Any, _only(True)] = None
    include_stop_str_in_output: Annotated[Any, _only(False)] = None
    guided_json: Annotated[Any, _only()] = None
    guided_regex: Annotated[Any, _only()] = None
    guided_choice: Annotated[Any, _only()] = None
    guided_grammar: Annotated[Any, _only()] = None
    structured_outputs: Annotated[Any, _only()] = None
    prompt_logprobs: Annotated[Any, _only()] = None

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> "GenerationBody":
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is only allowed with stream=true", "stream_options")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def sampling(self) -> SamplingParams:
        """What was sent, and our defaults for the rest. Raises `InvalidRequest` for values out of range."""
        given: dict[str, Any] = {
            "max_tokens": self._max_tokens(),
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": 0 if self.top_k == _VLLM_TOP_K_OFF else self.top_k,
            "seed": self.seed,
            "stop": self.stop,
            "stop_token_ids": self.stop_token_ids,
            "ignore_eos": self.ignore_eos,
            "n": self.n,
        }
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})

    def _max_tokens(self) -> int | None:
        return self.max_tokens


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Annotated[Prompts, BeforeValidator(_prompts)]
    suffix: Annotated[Any, _only("")] = None
    logprobs: Annotated[Any, _only(False)] = None


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: tuple[Message, ...]
    max_completion_tokens: Count | None = None
    logprobs: Annotated[Any, _only(False)] = None
    top_logprobs: Annotated[Any, _only(0)] = None
    response_format: Annotated[Any, _only({"type": "text"})] = None
    tools: Annotated[Any, _only([])] = None
    tool_choice: Annotated[Any, _only("none", "auto")] = None  # without tools, both mean none
    parallel_tool_calls: bool | None = None  # says nothing where there are no tools
    functions: Annotated[Any, _only([])] = None
    function_call: Annotated[Any, _only("none")] = None
    modalities: Annotated[Any, _only(["text"])] = None
    audio: Annotated[Any, _only()] = None
    prediction: Annotated[Any, _only()] = None
    reasoning_effort: Annotated[Any, _only("none")] = None
    verbosity: Annotated[Any, _only()] = None
    store: Annotated[Any, _only(False)] = None
    metadata: Annotated[Any, _only({})] = None
    service_tier: Annotated[Any, _only("auto", "default")] = None
    web_search_options: Annotated[Any, _only()] = None
    chat_template: Annotated[Any, _only()] = None
    chat_template_kwargs: Annotated[Any, _only({})] = None
    add_generation_prompt: Annotated[Any, _only(True)] = None
    continue_final_message: Annotated[Any, _only(False)] = None

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
        return kind.model_validate_json(body)
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
            return InvalidRequest(f"{asked}, not {_shown(problem['input'])}", param)


def _path(location: tuple[int | str, ...]) -> str | None:
    """("messages", 0, "content") -> messages[0].content"""
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return path.removeprefix(".") or None


def _shown(value: Any) -> str:
    """`value` as JSON would spell it, shortened: a wrong value may be megabytes long."""
    if isinstance(value, list | dict):
        value = f"a {'list' if isinstance(value, list) else 'object'} of {len(value)}"
        return str(value)
    names = {None: "null", True: "true", False: "false"} if value is None or isinstance(value, bool) else {}
    text = names.get(value) or repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
