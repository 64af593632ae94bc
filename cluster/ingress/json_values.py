"""Values of JSON that stand in more than one shape, or may stand in only one: validators for the bodies' fields.

What is wrong with a value is a `ValueError` that reads on from the field's name. Knows JSON; knows no field.
"""

import json
import re
from typing import Any

from pydantic import AfterValidator

_SHOWN_CHARACTERS = 60  # of a wrong value or name, in the message about it
_TOKEN_ID = re.compile(r"0|-?[1-9][0-9]{0,17}", re.ASCII)

Prompts = tuple[str | tuple[int, ...], ...]


def only(*off: Any) -> AfterValidator:
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


def stop_strings(value: Any) -> Any:
    """One string or several. A tuple, since what a validator returns is no longer a JSON array to pydantic."""
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def prompts(value: Any) -> Prompts:
    """OpenAI's four shapes: a string, a list of strings, a list of token ids, a list of such lists."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise ValueError(f"must be a string, a list of strings, or token ids, not {shown(value)}")
    if not value:
        raise ValueError("must not be an empty list")
    if _are_ids(value):
        return (tuple(value),)
    of_ids = _are_ids(value[:1])
    for position, item in enumerate(value):
        if of_ids and not _are_ids([item]):
            raise ValueError(f"has {shown(item)} at position {position}, which is no token id as those before it")
        if not of_ids and not isinstance(item, str) and not (isinstance(item, list) and _are_ids(item)):
            raise ValueError(f"has {shown(item)} at position {position}, which is neither text nor token ids")
    return tuple(item if isinstance(item, str) else tuple(item) for item in value)


def _are_ids(value: list[Any]) -> bool:
    return all(type(item) is int for item in value)


def logit_bias(value: Any) -> Any:
    """OpenAI's map from token ids, which JSON has as strings, to what is added to their logits."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError(f"must be an object from token ids to numbers, not {shown(value)}")
    for key, bias in value.items():
        if not _TOKEN_ID.fullmatch(key):
            raise ValueError(f"has the key {shown(key)}, which is not a token id")
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise ValueError(f"has {shown(bias)} for token {key}, which is not a number")
    return tuple((int(key), bias) for key, bias in value.items())


def false_is_off(value: Any) -> Any:
    """For a number that some clients turn off with false."""
    return None if value is False else value


def content(value: Any) -> Any:
    """Text, or a list of text parts, which are joined line by line."""
    if not isinstance(value, list):
        return value
    texts = []
    for position, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else part
            raise ValueError(f"has a part of type {shown(kind)} at position {position}; only text is supported")
        if part.keys() != {"type", "text"} or not isinstance(part["text"], str):
            raise ValueError(f"has a text part at position {position} that is not just a string as `text`")
        texts.append(part["text"])
    return "\n".join(texts)


def shown(value: Any) -> str:
    """`value` as JSON would spell it, shortened."""
    if isinstance(value, list | dict):
        value = f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
        return str(value)
    names = {None: "null", True: "true", False: "false"} if value is None or isinstance(value, bool) else {}
    return shortened(names.get(value) or repr(value))


def shortened(text: str) -> str:
    """For a message: what a user sent may be megabytes long."""
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
