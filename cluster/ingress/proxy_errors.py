"""What Serve's HTTP proxy answers when no ingress can: the same errors as ours, in OpenAI's shape.

Left to itself the proxy answers a request whose ingress dies with a plain 500, cuts its stream, and knows no route
of an application that is not there yet. It takes this middleware where the environment of every node says
`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=cluster.ingress.proxy_errors.middlewares`; HAProxy takes none. For a
Serve whose one application is ours, at `/`. Knows ASGI; knows nothing of Ray.
"""

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.errors import Unavailable
from cluster.ingress.openai import ApiError, api_error
from cluster.ingress.rendering import error_event

_SERVES_OWN = "/-/"  # the proxy's own health and routes
_LOST = "the ingress that had this request is gone"
_NOT_HERE = "the service is not up, or is being taken away"
_TRY_AGAIN_S = 5.0


def middlewares() -> list[Middleware]:
    """For Serve, which calls it in the proxy's process."""
    return [Middleware(ProxyErrors)]


class ProxyErrors:
    """Our application answers in JSON or in events. An error of another kind is the proxy's, and is replaced."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(_SERVES_OWN):
            await self._app(scope, receive, send)
            return
        answer = _Answer(send)
        await self._app(scope, receive, answer.send)
        if answer.replaced is not None:
            await answer.replaced.response()(scope, receive, send)
        elif not answer.started:
            await _unavailable(_LOST).response()(scope, receive, send)
        elif not answer.complete and answer.is_stream:
            event = error_event(_unavailable(_LOST).body()).encode()
            await send({"type": "http.response.body", "body": event, "more_body": False})


class _Answer:
    """Passes an answer on, and sees how far it has come. An error of the proxy is held back."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False
        self.complete = False
        self.is_stream = False
        self.replaced: ApiError | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            kind = dict(message["headers"]).get(b"content-type", b"")
            self.is_stream = kind.startswith(b"text/event-stream")
            status = message["status"]
            if (status == 404 or status >= 500) and not kind.startswith(b"application/json"):
                self.replaced = _unavailable(_NOT_HERE)
        elif message["type"] == "http.response.body":
            self.complete = not message.get("more_body", False)
        if self.replaced is None:
            await self._send(message)


def _unavailable(message: str) -> ApiError:
    return api_error(Unavailable(message, _TRY_AGAIN_S))
