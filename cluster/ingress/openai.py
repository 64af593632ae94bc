"""Errors in OpenAI's shape: one table from what can go wrong to HTTP status, `type` and `code`.

Knows our errors and OpenAI's; knows nothing of bodies, streams or the engine.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from cluster.errors import (
    ContextOverflow,
    GenerationFailed,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    ShardserveError,
    Unavailable,
)

_INVALID = "invalid_request_error"
_SERVER = "server_error"

# The first row whose class fits counts, so a subclass stands before its parent.
_TABLE: tuple[tuple[type[ShardserveError], int, str, str | None], ...] = (
    (ContextOverflow, 400, _INVALID, "context_length_exceeded"),
    (InvalidRequest, 400, _INVALID, None),
    (ModelNotFound, 404, _INVALID, "model_not_found"),
    (Overloaded, 429, "rate_limit_error", "rate_limit_exceeded"),
    (Unavailable, 503, "service_unavailable_error", "service_unavailable"),
    (GenerationFailed, 500, _SERVER, "generation_failed"),
)
_HTTP_CODES = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large", 415: "unsupported_media_type"}


@dataclass(frozen=True, slots=True)
class ApiError:
    """What a client is told, in a response or in the middle of a stream."""

    status: int
    message: str
    type: str
    code: str | None = None
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, dict(self.headers))


def api_error(error: Exception) -> ApiError:
    """The table's answer to `error`. What is not in it is a fault of ours, of which a client learns nothing."""
    if isinstance(error, HTTPException):
        code = _HTTP_CODES.get(error.status_code)
        return ApiError(error.status_code, error.detail, _INVALID, code, headers=error.headers or {})
    for kind, status, error_type, code in _TABLE:
        if isinstance(error, kind):
            return ApiError(status, str(error), error_type, code, _param(error), _headers(error))
    return ApiError(500, "an internal error happened; the server's log has it", _SERVER, "internal_error")


def _param(error: Exception) -> str | None:
    match error:
        case InvalidRequest(field=name):
            return name
        case ModelNotFound():
            return "model"
        case _:
            return None


def _headers(error: Exception) -> dict[str, str]:
    match error:
        case Overloaded(retry_after_s=seconds) | Unavailable(retry_after_s=seconds):
            return {"Retry-After": str(max(1, math.ceil(seconds)))}
        case _:
            return {}
