"""Every way in feeds the same ids: a raw prompt has the tokenizer's BOS, a conversation its template's.

Kind of fault: a BOS from the tokenizer before the one that the template has written, at some of the entry points.
"""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from cluster.generation import SamplingParams
from cluster.ingress.app import build_app
from cluster.llm import LLM
from cluster.text.chat_template import load_chat_template
from cluster.text.completer import Completer
from cluster.text.tokenizer import load_tokenizer
from tests.cluster.ingress.served import CHAT, COMPLETIONS, CONTEXT, MODEL, chat, completion, http, no_stats
from tests.fakes.checkpoints import SPECIAL_TOKENS, write_counter_model
from tests.fakes.scripted_source import ScriptedSource

BOS = SPECIAL_TOKENS[1]
BOS_ID = 257
MESSAGES = [{"role": "user", "content": "hi"}]
TURNS = "{% for message in messages %}{{ message.content }}!{% endfor %}"
ONE_TOKEN = SamplingParams(max_tokens=1)


@pytest.fixture(params=["tokenizer adds it", "template writes it", "both", "neither"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A counter model whose tokenizer, template, both or neither have a BOS."""
    folder = write_counter_model(tmp_path / "counter", cycle=range(32, 127))
    if request.param in ("tokenizer adds it", "both"):
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.post_processor = TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, BOS_ID)])
        tokenizer.save(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["bos_token"] = BOS
    settings["chat_template"] = (
        "{{ bos_token }}" if request.param in ("template writes it", "both") else ""
    ) + TURNS
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


async def over_http(model: Path) -> dict[str, list[tuple[int, ...]]]:
    """What each route feeds, by kind of prompt; `/tokenize` says what it would."""
    source = ScriptedSource()
    completer = Completer(load_tokenizer(model), load_chat_template(model), source, CONTEXT)
    client = http(build_app(completer, MODEL, lambda: None, engine_stats=no_stats, version="1", limits=None))
    for stream in (False, True):
        await client.post(COMPLETIONS, json=completion("hi", stream=stream))
        await client.post(CHAT, json=chat("hi", stream=stream))
    raw, conversation, *streamed = (request.prompt_token_ids for request in source.requests)
    told = [
        (await client.post("/tokenize", json=body)).json()["tokens"] for body in ({"prompt": "hi"}, chat("hi"))
    ]
    in_python = await completer.prepare_chat("id", MESSAGES, ONE_TOKEN, None)  # what `Client` calls over there
    return {
        "raw": [raw, streamed[0], tuple(told[0])],
        "chat": [conversation, streamed[1], tuple(told[1]), in_python.prompt_token_ids],
    }


async def test_all_ways_in_feed_the_same_ids_and_never_two_bos(
    model: Path, request: pytest.FixtureRequest
) -> None:
    ids = await over_http(model)
    with LLM(str(model), device="cpu", kv_cache_memory="1MiB", max_model_len=64) as llm:
        (raw,), (conversation,) = llm.generate("hi", ONE_TOKEN), llm.chat(MESSAGES, ONE_TOKEN)
    case = request.node.callspec.params["model"]
    for kind, text, owner, offline in (
        ("raw", b"hi", "tokenizer adds it", raw),
        ("chat", b"hi!", "template writes it", conversation),
    ):
        expected = (*((BOS_ID,) if case in (owner, "both") else ()), *text)
        assert ids[kind] == [expected] * len(ids[kind])
        assert offline.prompt_token_ids == expected
