"""A conversation to the text that the model was trained to continue.

Knows Jinja chat templates as the Hugging Face ecosystem writes them; knows nothing of tokens. A template owns the
special tokens: what it renders is tokenised without adding any.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cluster.errors import InvalidRequest
from cluster.text.tokenizer_files import TokenizerFiles, read_tokenizer_files
from model_shards.errors import CheckpointError

ChatMessage = Mapping[str, str]  # role, content


class _GenerationBlock(Extension):
    """`{% generation %} ... {% endgeneration %}` marks the model's part for training; it renders as its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template. Raises `CheckpointError` for a template that is not Jinja."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],  # bos_token, eos_token ...: variables of the template
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock], autoescape=False
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        # A variable that is absent renders as nothing, so every special token has a value.
        self._variables = {"bos_token": "", "eos_token": "", **special_tokens}
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(f"the model's chat template: line {error.lineno}: {error.message}") from None

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """The prompt that asks for the next answer. Raises `InvalidRequest` when the template refuses."""
        try:
            return self._template.render(
                **self._variables,
                messages=[dict(message) for message in messages],
                add_generation_prompt=True,
                tools=None,  # templates ask `is not none`, which an absent variable would pass
                documents=None,
            )
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise InvalidRequest(f"the model's chat template refused the messages: {error}", "messages") from None


def load_chat_template(path: Path) -> ChatTemplate | None:
    """The chat template of a model folder or a `.gguf` file; None when it has none."""
    return chat_template_of(read_tokenizer_files(path))


def chat_template_of(files: TokenizerFiles) -> ChatTemplate | None:
    """The chat template among files that were read already."""
    if files.chat_template is None:
        return None
    tokens = {"bos_token": files.bos_token, "eos_token": files.eos_token, **files.other_special_tokens}
    return ChatTemplate(files.chat_template, {name: text for name, text in tokens.items() if text is not None})


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """Jinja's own filter escapes for HTML, which a prompt must not be."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
