"""Batch files: every line gets one answer, once, whatever interrupts the run."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import InvalidConfig, Unavailable
from cluster.offline.batch import Answer, BatchPlan, Finished, prepare, run_batch


class FakeEndpoint:
    """Echoes; refuses bodies without `prompt`; can break after a number of answers."""

    def __init__(self, breaks_after: int | None = None) -> None:
        self.posted: list[dict[str, Any]] = []
        self.answered = 0
        self.running = 0
        self.most_running = 0
        self._breaks_after = breaks_after

    async def post(self, url: str, body: dict[str, Any]) -> Answer:
        self.posted.append(body)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            for _ in range(int(body.get("turns", 1))):
                await asyncio.sleep(0)
        finally:
            self.running -= 1
        if self.answered == self._breaks_after:
            return Answer(503, "", {"error": {"message": "the group is gone"}})
        self.answered += 1
        if "prompt" not in body:
            return Answer(400, "", {"error": {"message": "prompt is required", "param": "prompt"}})
        usage = {"prompt_tokens": 1, "completion_tokens": 7, "total_tokens": 8}
        return Answer(200, f"cmpl-{body['prompt']}", {"id": f"cmpl-{body['prompt']}", "url": url, "usage": usage})


def _line(custom_id: Any, **changes: Any) -> dict[str, Any]:
    line = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {"prompt": custom_id}}
    return {**line, **changes}


def _write(path: Path, lines: Sequence[dict[str, Any] | str]) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def _run(plan: BatchPlan, endpoint: FakeEndpoint, in_flight: int = 4) -> list[Finished]:
    finished: list[Finished] = []
    await run_batch(plan, endpoint, in_flight=in_flight, on_finished=finished.append)
    return finished


async def test_every_request_is_answered_in_openais_format(tmp_path: Path) -> None:
    source = _write(tmp_path / "in", [_line("a"), "", _line("b")])
    finished = await _run(prepare(source, tmp_path / "out"), FakeEndpoint())
    lines = {line["custom_id"]: line for line in _read(tmp_path / "out")}
    assert lines.keys() == {"a", "b"}
    assert lines["a"].keys() == {"id", "custom_id", "response", "error"}
    assert lines["a"]["error"] is None
    assert lines["a"]["response"]["status_code"] == 200
    assert lines["a"]["response"]["request_id"] == "cmpl-a"
    assert lines["a"]["response"]["body"]["url"] == "/v1/completions"
    assert len({line["id"] for line in lines.values()}) == 2
    assert [(item.failed, item.completion_tokens) for item in finished] == [(False, 7), (False, 7)]


async def test_answers_are_written_as_they_come(tmp_path: Path) -> None:
    slow = _line("slow", body={"prompt": "slow", "turns": 50})
    source = _write(tmp_path / "in", [slow, _line("quick")])
    await _run(prepare(source, tmp_path / "out"), FakeEndpoint())
    assert [line["custom_id"] for line in _read(tmp_path / "out")] == ["quick", "slow"]


@pytest.mark.parametrize("in_flight", [1, 3, 100])
async def test_so_many_are_in_flight(in_flight: int, tmp_path: Path) -> None:
    source = _write(tmp_path / "in", [_line(str(i), body={"prompt": i, "turns": 3}) for i in range(20)])
    endpoint = FakeEndpoint()
    assert len(await _run(prepare(source, tmp_path / "out"), endpoint, in_flight)) == 20
    assert endpoint.most_running == min(in_flight, 20)


@pytest.mark.parametrize(
    ("line", "custom_id", "code", "message"),
    [
        ("{not json", None, "invalid_json_line", "line 1 is not JSON"),
        ("[1]", None, "invalid_line", "line 1 is not an object"),
        (_line(""), None, "missing_custom_id", "custom_id must be a non-empty string"),
        (_line(7), None, "missing_custom_id", "custom_id must be a non-empty string"),
        (_line("x", method="GET"), "x", "invalid_line", "method must be POST, not 'GET'"),
        (
            _line("x", url="/v1/embeddings"),
            "x",
            "invalid_line",
            "url must be /v1/chat/completions or /v1/completions",
        ),
        (_line("x", body="hello"), "x", "invalid_line", "body must be an object"),
        (
            _line("x", body={"prompt": "x", "stream": True}),
            "x",
            "invalid_line",
            "stream cannot be true in a batch",
        ),
        (_line("x", priority=1), "x", "invalid_line", "'priority' is no key of a batch request"),
    ],
)
async def test_a_bad_line_is_an_error_line_and_the_rest_runs(
    line: dict[str, Any] | str, custom_id: str | None, code: str, message: str, tmp_path: Path
) -> None:
    source = _write(tmp_path / "in", [line, _line("good")])
    finished = await _run(prepare(source, tmp_path / "out"), FakeEndpoint())
    bad, good = _read(tmp_path / "out")
    assert (bad["custom_id"], bad["response"], bad["error"]["code"]) == (custom_id, None, code)
    assert message in bad["error"]["message"]
    assert good["custom_id"] == "good"
    assert [item.failed for item in finished] == [True, False]


async def test_a_refused_request_has_its_refusal_as_response(tmp_path: Path) -> None:
    source = _write(tmp_path / "in", [_line("x", body={})])
    (finished,) = await _run(prepare(source, tmp_path / "out"), FakeEndpoint())
    (line,) = _read(tmp_path / "out")
    assert (line["error"], line["response"]["status_code"]) == (None, 400)
    assert line["response"]["body"]["error"]["param"] == "prompt"
    assert finished.failed


async def test_a_second_run_has_nothing_to_do(tmp_path: Path) -> None:
    source = _write(tmp_path / "in", [_line("a"), "{bad", _line("b", method="PUT")])
    await _run(prepare(source, tmp_path / "out"), FakeEndpoint())
    before = (tmp_path / "out").read_bytes()
    plan = prepare(source, tmp_path / "out")
    assert len(plan.done) == plan.total == 3
    endpoint = FakeEndpoint()
    assert await _run(plan, endpoint) == []
    assert endpoint.posted == []
    assert (tmp_path / "out").read_bytes() == before


async def test_an_interrupted_run_is_resumed_at_any_byte(tmp_path: Path) -> None:
    source = _write(tmp_path / "in", [_line("a"), _line("b"), "{bad"])
    await _run(prepare(source, tmp_path / "whole"), FakeEndpoint(), in_flight=1)
    whole = (tmp_path / "whole").read_bytes()
    output = tmp_path / "out"
    for cut in range(len(whole)):
        output.write_bytes(whole[:cut])
        endpoint = FakeEndpoint()
        await _run(prepare(source, output), endpoint, in_flight=1)
        assert sorted(output.read_bytes().splitlines()) == sorted(whole.splitlines())
        assert len(endpoint.posted) == 2 - sum(
            b"cmpl-" in line for line in whole[:cut].splitlines(True) if line[-1:] == b"\n"
        )


async def test_when_no_tokens_can_be_made_the_run_ends_and_can_be_resumed(tmp_path: Path) -> None:
    source = _write(tmp_path / "in", [_line(str(i)) for i in range(9)])
    with pytest.raises(Unavailable, match="the group is gone"):
        await _run(prepare(source, tmp_path / "out"), FakeEndpoint(breaks_after=5))
    assert len(_read(tmp_path / "out")) == 5
    await _run(prepare(source, tmp_path / "out"), FakeEndpoint())
    assert sorted(line["custom_id"] for line in _read(tmp_path / "out")) == [str(i) for i in range(9)]


async def test_requests_that_run_are_cancelled_when_the_run_ends(tmp_path: Path) -> None:
    lines = [_line("a"), _line("endless", body={"prompt": "endless", "turns": 10**9})]
    endpoint = FakeEndpoint()
    run = asyncio.create_task(_run(prepare(_write(tmp_path / "in", lines), tmp_path / "out"), endpoint))
    while not (tmp_path / "out").read_bytes():
        await asyncio.sleep(0)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert endpoint.running == 0


def test_a_custom_id_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    source = _write(tmp_path / "in", [_line("a"), _line("b"), _line("a")])
    with pytest.raises(InvalidConfig, match="custom_id 'a' is on line 1 and on line 3"):
        prepare(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": "batch_req_1", "custom_id": "other"}', "line 1 answers 'other', which is not in the input"),
        ("my notes", "line 1 is no line of a batch output"),
        ("[]", "line 1 is no line of a batch output"),
    ],
)
def test_an_output_of_something_else_is_left_alone(line: str, message: str, tmp_path: Path) -> None:
    source = _write(tmp_path / "in", [_line("a")])
    output = _write(tmp_path / "out", [line])
    with pytest.raises(InvalidConfig, match=message):
        prepare(source, output)
    assert output.read_text() == f"{line}\n"


def test_files_that_cannot_be(tmp_path: Path) -> None:
    source = _write(tmp_path / "in", [_line("a")])
    with pytest.raises(InvalidConfig, match=r"--input .*missing: No such file"):
        prepare(tmp_path / "missing", tmp_path / "out")
    with pytest.raises(InvalidConfig, match=r"--output .*out: No such file"):
        prepare(source, tmp_path / "no" / "out")
    with pytest.raises(InvalidConfig, match="same file"):
        prepare(source, source)
