"""What the proxy says when an ingress is lost: an error in OpenAI's shape, whatever had been sent before."""

import json
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.ingress.proxy_errors import ProxyErrors, middlewares
from cluster.launch.ray_node import PROXY_CALLBACK

EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8")]
JSON = [(b"content-type", b"application/json")]
TEXT = [[b"content-type", b"text/plain; charset=utf-8"]]


def proxy(*messages: dict[str, Any]) -> ASGIApp:
    """Serve's proxy, which sends these messages and returns, as it does when a replica dies."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for message in messages:
            await send(message)

    return ProxyErrors(app)


def start(status: int, headers: list[Any]) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": headers}


def body(text: bytes, *, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": text, "more_body": more}


async def ask(app: ASGIApp, path: str = "/v1/completions") -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://here") as client:
        return await client.post(path)


def is_unavailable(response: httpx.Response) -> bool:
    error = response.json()["error"]
    assert int(response.headers["retry-after"]) >= 1
    return response.status_code == 503 and error["code"] == "service_unavailable"


async def test_a_lost_ingress_before_its_answer_is_a_503() -> None:
    assert is_unavailable(await ask(proxy()))


async def test_a_lost_ingress_in_a_stream_is_an_error_event() -> None:
    response = await ask(proxy(start(200, EVENTS), body(b'data: {"a":1}\n\n', more=True)))
    first, last = response.text.strip().split("\n\n")
    assert response.status_code == 200
    assert json.loads(first.removeprefix("data: ")) == {"a": 1}
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == "service_unavailable_error"


@pytest.mark.parametrize("status", [404, 500, 503])
async def test_the_proxys_own_errors_are_replaced(status: int) -> None:
    assert is_unavailable(await ask(proxy(start(status, TEXT), body(b"Path '/v1' not found."))))


@pytest.mark.parametrize(
    ("status", "headers"), [(200, JSON), (200, EVENTS), (404, JSON), (503, JSON), (200, TEXT), (408, TEXT)]
)
async def test_what_is_complete_passes_unchanged(status: int, headers: list[Any]) -> None:
    response = await ask(proxy(start(status, headers), body(b"as", more=True), body(b" is")))
    assert (response.status_code, response.text) == (status, "as is")


async def test_the_proxys_own_routes_are_its_own() -> None:
    response = await ask(proxy(start(503, TEXT), body(b"draining")), "/-/healthz")
    assert (response.status_code, response.text) == (503, "draining")


def test_the_launcher_names_what_serve_is_to_call() -> None:
    module, name = PROXY_CALLBACK.rsplit(".", 1)
    assert (module, name) == (middlewares.__module__, middlewares.__name__)
    assert [str(each.cls) for each in middlewares()] == [str(ProxyErrors)]
