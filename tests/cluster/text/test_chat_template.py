"""Chat templates: Jinja as the ecosystem writes it, in a sandbox."""

from datetime import datetime

import pytest

from cluster.errors import InvalidRequest
from cluster.text.chat_template import ChatTemplate
from model_shards.errors import CheckpointError

MESSAGES = [{"role": "user", "content": "hi <b>"}]


def render(source: str, **tokens: str) -> str:
    return ChatTemplate(source, tokens, now=lambda: datetime(2026, 1, 2)).render(MESSAGES)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{{ messages[0].content }}", "<s>hi <b>"),
        ("{% if true %}\n  x\n  {% endif %}\ny", "  x\ny"),  # trim_blocks and lstrip_blocks
        ("{{ messages | tojson }}", '[{"role": "user", "content": "hi <b>"}]'),
        ("{{ strftime_now('%d %b %Y') }}", "02 Jan 2026"),
        ("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}", "hi <b>"),
        ("{% for m in messages %}{% break %}{% endfor %}", ""),
        ("{% if tools is not none %}tools{% endif %}{% if documents is not none %}docs{% endif %}", ""),
        ("{% if add_generation_prompt %}>{% endif %}", ">"),
        ("[{{ pad_token }}{{ eos_token }}]", "[]"),  # absent tokens are empty
    ],
)
def test_what_templates_use(source: str, text: str) -> None:
    assert render(source, bos_token="<s>") == text


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ messages[3].content }}", "no element 3"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ 1 / 0 }}", "zero"),
    ],
)
def test_a_refusal_names_messages(source: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as refusal:
        render(source)
    assert refusal.value.field == "messages"


def test_a_broken_template_is_found_when_it_is_loaded() -> None:
    with pytest.raises(CheckpointError, match="line 2"):
        ChatTemplate("{{ x }}\n{% if %}", {})
