"""What one HTTP request may ask for at the most.

Knows sizes and counts; how many requests may wait is the engine's limit.
"""

from dataclasses import dataclass

from starlette.exceptions import HTTPException
from starlette.requests import Request

from cluster.errors import InvalidRequest
from cluster.generation import MAX_CHOICES, RequestOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on a single request, so that one client cannot take the place of many."""

    max_body_bytes: int = 4 * 2**20
    max_prompts: int = 64  # in one request to /v1/completions
    max_choices: int = MAX_CHOICES  # prompts x n
    allow_priority: bool = False  # to go before others, or behind them

    def check(self, num_prompts: int, n: int) -> None:
        """Raises `InvalidRequest` with the numbers."""
        if num_prompts > self.max_prompts:
            raise InvalidRequest(
                f"prompt has {num_prompts} prompts, but one request may have at most {self.max_prompts}", "prompt"
            )
        if num_prompts * n > self.max_choices:
            raise InvalidRequest(
                f"n is {n} for {num_prompts} prompts, together {num_prompts * n} choices, but one request may "
                f"have at most {self.max_choices}",
                "n",
            )

    def check_options(self, options: RequestOptions) -> None:
        """Raises `InvalidRequest` for a priority where the operator gives none."""
        if options.priority and not self.allow_priority:
            raise InvalidRequest(
                f"priority is {options.priority}, but this server treats all requests alike; its operator can "
                "allow priorities by the setting allow_priority",
                "priority",
            )

    async def read_body(self, request: Request) -> bytes:
        """The body of a JSON request. Raises `HTTPException` 413 when it is too large, 415 when it is no JSON."""
        kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if kind != "application/json" and not kind.endswith("+json"):
            raise HTTPException(415, f"the content type must be application/json, not {kind or 'empty'}")
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > self.max_body_bytes:
                raise HTTPException(413, f"the body is larger than the limit of {self.max_body_bytes} bytes")
        return bytes(body)
