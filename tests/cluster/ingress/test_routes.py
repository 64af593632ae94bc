"""The small routes, and errors outside any route."""

import pytest

from tests.cluster.ingress.served import CHAT, COMPLETIONS, CONTEXT, MODEL, app_over, chat, http
from tests.fakes.byte_tokenizer import BOS_ID
from tests.fakes.scripted_source import ScriptedSource


async def test_health_says_whether_a_token_can_be_made() -> None:
    reason: str | None = "rank 1 of 2 is being restarted"
    client = http(app_over(ScriptedSource(), unavailable_because=lambda: reason))
    sick = await client.get("/health")
    assert sick.status_code == 503
    assert sick.json()["error"]["message"] == reason
    assert sick.headers["retry-after"] == "5"
    assert (await client.get("/live")).status_code == 200
    reason = None
    assert (await client.get("/health")).status_code == 200


async def test_version_and_models() -> None:
    client = http(app_over(ScriptedSource()))
    assert (await client.get("/version")).json() == {"version": "1.2.3"}
    model = {"id": MODEL, "object": "model", "created": 1000, "owned_by": "shardserve", "max_model_len": CONTEXT}
    assert (await client.get("/v1/models")).json() == {"object": "list", "data": [model]}
    assert (await client.get(f"/v1/models/{MODEL}")).json() == model
    assert (await client.get("/v1/models/org/other")).json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "not_found"),
        ("POST", "/v1/embeddings", 404, "not_found"),
        ("POST", f"{CHAT}/", 404, "not_found"),
        ("POST", f"{COMPLETIONS}/", 404, "not_found"),
        ("GET", "/v1/models/", 404, "not_found"),
        ("GET", "/health/", 404, "not_found"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
    ],
)
async def test_unknown_routes_and_methods(method: str, path: str, status: int, code: str) -> None:
    answer = await http(app_over(ScriptedSource())).request(method, path)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert (error["code"], error["type"]) == (code, "invalid_request_error")
    assert path in error["message"]
    assert ("allow" in answer.headers) == (status == 405)


async def test_tokenize_shows_exactly_what_is_fed() -> None:
    source = ScriptedSource()
    client = http(app_over(source, bos=True))
    await client.post("/v1/completions", json={"model": MODEL, "prompt": "hi"})
    await client.post(CHAT, json=chat("hi"))
    raw, conversation = (list(request.prompt_token_ids) for request in source.requests)
    tokenized = (await client.post("/tokenize", json={"prompt": "hi"})).json()
    assert tokenized == {"count": 3, "max_model_len": CONTEXT, "tokens": raw}
    assert raw == [BOS_ID, *b"hi"]
    answer = await client.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]})
    assert answer.json()["tokens"] == conversation
    assert conversation.count(BOS_ID) == 1
    bare = await client.post("/tokenize", json={"prompt": "hi", "add_special_tokens": False})
    assert bare.json()["tokens"] == [*b"hi"]


async def test_tokenize_takes_no_text_that_cannot_fit() -> None:
    client = http(app_over(ScriptedSource()))
    for body in ({"prompt": "x" * 500_000}, chat("x" * 500_000)):
        answer = await client.post("/tokenize", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


async def test_detokenize() -> None:
    client = http(app_over(ScriptedSource()))
    assert (await client.post("/detokenize", json={"tokens": [BOS_ID, *b"hi"]})).json() == {"prompt": "hi"}
    assert (await client.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}
    assert (await client.post("/detokenize", json={"tokens": [999]})).json()["error"]["param"] == "tokens"
    assert (await client.post("/detokenize", json={"tokens": [97] * CONTEXT})).json() == {"prompt": "a" * CONTEXT}
    long = await client.post("/detokenize", json={"tokens": [97] * (CONTEXT + 1)})
    assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert f"tokens has {CONTEXT + 1} tokens" in long.json()["error"]["message"]
    assert (await client.post("/tokenize", json={})).status_code == 400
    assert (await client.post("/tokenize", json={"prompt": "x", "model": "other"})).status_code == 404


async def test_a_model_without_chat_template_refuses_chat() -> None:
    answer = await http(app_over(ScriptedSource(), template=False)).post(CHAT, json=chat())
    assert answer.status_code == 400
    assert "no chat template" in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "messages"
