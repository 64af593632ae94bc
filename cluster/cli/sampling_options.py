"""`SamplingParams` on the command line: each option is a parameter's name with dashes; lists are repeated options.

Not here: `n`, since a terminal shows one text, and log-probabilities, which it does not show at all.
"""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

import typer


def _option(what: str, *names: str, metavar: str | None = None) -> Any:
    """`names` where the parameter's own, and its `--no-` for a flag, will not do."""
    panel = "Sampling, with --prompt"
    return typer.Option(*names, help=what, metavar=metavar, rich_help_panel=panel, show_default=False)


MaxTokens = Annotated[int | None, _option("Tokens to generate (default: up to the context's end).")]
MinTokens = Annotated[int | None, _option("No stop before this many tokens (default: 0).")]
Temperature = Annotated[float | None, _option("0 is greedy (default: 1).")]
TopP = Annotated[float | None, _option("The likeliest tokens with this sum of probability (default: 1).")]
TopK = Annotated[int | None, _option("This many likeliest tokens (default: 0, all).")]
MinP = Annotated[float | None, _option("Tokens at least this share as likely as the likeliest (default: 0).")]
RepetitionPenalty = Annotated[float | None, _option("For tokens of prompt and output (default: 1, none).")]
PresencePenalty = Annotated[float | None, _option("For tokens that the output has (default: 0).")]
FrequencyPenalty = Annotated[float | None, _option("For each time that the output has them (default: 0).")]
LogitBias = Annotated[list[str] | None, _option("Added to a token's logit; may be repeated.", metavar="ID=BIAS")]
BadWords = Annotated[list[str] | None, _option("Never generate this; may be repeated.", metavar="TEXT")]
AllowedTokenIds = Annotated[list[int] | None, _option("Generate no other token; may be repeated.", metavar="ID")]
Seed = Annotated[int | None, _option("Of the random choices (default: a new one).")]
Stop = Annotated[list[str] | None, _option("End before this text; may be repeated.", metavar="TEXT")]
StopTokenIds = Annotated[list[int] | None, _option("End with this token; may be repeated.", metavar="ID")]
IncludeStop = Annotated[bool | None, _option("End after the text of --stop.", "--include-stop-str-in-output")]
IgnoreEos = Annotated[bool | None, _option("Go on after the model's end of text.", "--ignore-eos")]


def sampling_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """Of a command's options, what was given for `SamplingParams`, in its types.

    Raises `InvalidRequest` for a bias that is none.
    """
    from cluster.generation import SamplingParams

    names = {field.name for field in dataclasses.fields(SamplingParams)}
    fields = {name: value for name, value in options.items() if name in names and value not in (None, [])}
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    if "logit_bias" in fields:
        fields["logit_bias"] = tuple(map(_bias, fields["logit_bias"]))
    return fields


def _bias(text: str) -> tuple[int, float]:
    from cluster.errors import InvalidRequest

    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise InvalidRequest(
            f"--logit-bias must be a token id, = and a number, not {text!r}", "logit_bias"
        ) from None
