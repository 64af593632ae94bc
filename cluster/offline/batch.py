"""Files of requests in OpenAI's batch format, answered without a server; can be stopped and resumed at any time.

An input line is {"custom_id", "method": "POST", "url", "body"}; an output line is {"id", "custom_id", "response",
"error"}, in the order in which requests finish. A request that is refused has its refusal as `response`, as over
HTTP; a line that is no request has `error` and no `response`. Knows files and lines; knows nothing of tokens.
"""

import asyncio
import json
import os
from collections.abc import AsyncGenerator, Callable, Container, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from cluster.errors import InvalidConfig, Unavailable

URLS = ("/v1/chat/completions", "/v1/completions")
_KEYS = frozenset({"custom_id", "method", "url", "body"})
_UNAVAILABLE = 503


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back for one request: HTTP's status and the body in OpenAI's shape."""

    status: int
    request_id: str
    body: dict[str, Any]


class Endpoint(Protocol):
    """Answers one request as the HTTP API would, without the network."""

    async def post(self, url: str, body: dict[str, Any]) -> Answer: ...


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A line of the input that can be sent."""

    line: int
    custom_id: str
    url: str
    body: dict[str, Any]

    @property
    def id(self) -> str:
        return f"batch_req_{self.line}"

    @property
    def key(self) -> str:
        """What tells on a next run that this line has been answered."""
        return self.custom_id


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line of the input that cannot be sent, and why. `custom_id` as far as it has one."""

    line: int
    custom_id: str | None
    code: str
    message: str

    @property
    def id(self) -> str:
        return f"batch_req_{self.line}"

    @property
    def key(self) -> str:
        return self.custom_id or self.id


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """An input that has been looked through, and what of it the output already has."""

    source: Path
    output: Path
    total: int
    done: frozenset[str]  # keys of the lines that are answered


@dataclass(frozen=True, slots=True)
class Finished:
    """One output line that was written."""

    failed: bool
    completion_tokens: int


def prepare(source: Path, output: Path) -> BatchPlan:
    """Look through both files and cut a torn last line off the output. Raises `InvalidConfig`; sends nothing.

    Refused: files that cannot be read or written, a custom_id that occurs twice, an output of other requests.
    """
    if source.absolute() == output.absolute():
        raise InvalidConfig(f"--input and --output are the same file: {source}")
    lines: dict[str, int] = {}  # key -> line
    for item in read_requests(source):
        if item.key in lines:
            first = lines[item.key]
            raise InvalidConfig(f"{source}: custom_id {item.key!r} is on line {first} and on line {item.line}")
        lines[item.key] = item.line
    return BatchPlan(source, output, len(lines), frozenset(_answered(output, lines)))


def read_requests(source: Path) -> Iterator[BatchRequest | BadLine]:
    """The lines of `source`; blank ones are skipped. Raises `InvalidConfig` when it cannot be read."""
    try:
        with source.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield _parse(number, line)
    except OSError as error:
        raise InvalidConfig(f"--input {source}: {error.strerror or error}") from None


def _parse(number: int, line: bytes) -> BatchRequest | BadLine:
    try:
        content = json.loads(line)
    except ValueError as error:
        return BadLine(number, None, "invalid_json_line", f"line {number} is not JSON: {error}")
    if not isinstance(content, dict):
        return BadLine(
            number, None, "invalid_line", f"line {number} is not an object with custom_id, url and body"
        )
    custom_id = content.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        return BadLine(number, None, "missing_custom_id", f"line {number}: custom_id must be a non-empty string")
    problem = _problem(content)
    if problem is not None:
        return BadLine(number, custom_id, "invalid_line", f"line {number}: {problem}")
    return BatchRequest(number, custom_id, content["url"], content["body"])


def _problem(content: dict[str, Any]) -> str | None:
    unknown = sorted(content.keys() - _KEYS)
    if unknown:
        return f"{', '.join(map(repr, unknown))} is no key of a batch request ({', '.join(sorted(_KEYS))})"
    if content.get("method", "POST") != "POST":
        return f"method must be POST, not {content['method']!r}"
    if content.get("url") not in URLS:
        return f"url must be {' or '.join(URLS)}, not {content.get('url')!r}"
    if not isinstance(content.get("body"), dict):
        return "body must be an object"
    if content["body"].get("stream"):
        return "stream cannot be true in a batch"
    return None


def _answered(output: Path, wanted: Container[str]) -> Iterator[str]:
    """Keys of the lines that `output` has. A last line without its end was torn by an interruption: it is cut."""
    try:
        descriptor = os.open(output, os.O_RDWR | os.O_CREAT, 0o666)
        with open(descriptor, "r+b") as stream:
            end = 0
            for number, line in enumerate(stream, start=1):
                if not line.endswith(b"\n"):
                    break
                yield _answered_key(output, number, line, wanted)
                end += len(line)
            stream.truncate(end)
    except OSError as error:
        raise InvalidConfig(f"--output {output}: {error.strerror or error}") from None


def _answered_key(output: Path, number: int, line: bytes, wanted: Container[str]) -> str:
    try:
        content = json.loads(line)
        key = str(content["custom_id"] or content["id"])
    except (ValueError, LookupError, TypeError):
        raise InvalidConfig(
            f"--output {output}: line {number} is no line of a batch output; choose another"
        ) from None
    if key not in wanted:
        raise InvalidConfig(
            f"--output {output}: line {number} answers {key!r}, which is not in the input: choose another"
        )
    return key


async def run_batch(
    plan: BatchPlan,
    endpoint: Endpoint,
    *,
    in_flight: int,
    on_finished: Callable[[Finished], None] = lambda finished: None,
) -> None:
    """Send what `plan` has left, `in_flight` at a time, and append each answer as it comes.

    Raises `Unavailable` when no more tokens can be made; what was answered is in the output, the rest is for
    the next run.
    """
    with plan.output.open("ab") as stream:
        async with aclosing(_answers(plan, endpoint, in_flight)) as answers:
            async for item, answer in answers:
                line = _output_line(item, answer)
                stream.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
                stream.flush()
                on_finished(_finished(line))


Answered = tuple[BatchRequest | BadLine, Answer | None]


async def _answers(plan: BatchPlan, endpoint: Endpoint, in_flight: int) -> AsyncGenerator[Answered, None]:
    waiting = (item for item in read_requests(plan.source) if item.key not in plan.done)
    running: set[asyncio.Task[Answered]] = set()
    try:
        while True:
            while len(running) < in_flight and (item := next(waiting, None)) is not None:
                if isinstance(item, BadLine):
                    yield item, None
                else:
                    running.add(asyncio.create_task(_send(endpoint, item)))
            if not running:
                return
            finished, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(finished, key=lambda task: task.exception() is not None):  # answers before failures
                yield task.result()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _send(endpoint: Endpoint, request: BatchRequest) -> Answered:
    answer = await endpoint.post(request.url, request.body)
    if answer.status == _UNAVAILABLE:
        raise Unavailable(answer.body.get("error", {}).get("message", "no tokens can be made"))
    return request, answer


def _output_line(item: BatchRequest | BadLine, answer: Answer | None) -> dict[str, Any]:
    response = error = None
    if answer is not None:
        response = {"status_code": answer.status, "request_id": answer.request_id, "body": answer.body}
    elif isinstance(item, BadLine):
        error = {"code": item.code, "message": item.message}
    return {"id": item.id, "custom_id": item.custom_id, "response": response, "error": error}


def _finished(line: dict[str, Any]) -> Finished:
    response = line["response"]
    usage = response["body"].get("usage") if response else None
    return Finished(
        failed=response is None or response["status_code"] != 200,
        completion_tokens=usage["completion_tokens"] if usage else 0,
    )
