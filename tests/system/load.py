"""Clients that ask without end, each answer judged: exact, refused, failed with a clear error, or wrong.

Of the counter model every answer is known beforehand, so what is lost, repeated or made up shows as a difference
of strings. Knows HTTP, `Client` and the counter model; knows nothing of what disturbs them.
"""

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import httpx

from cluster.errors import GenerationFailed, Unavailable
from cluster.generation import SamplingParams
from tests.system.conftest import MODEL, PRINTABLE, Served, counted

_DEADLINE_S = 120.0  # for an answer, whatever happens meanwhile: after it the client counts as hung
_SHORTEST, _LONGEST = 10, 600
_AGAIN_S = 0.2  # after an answer, at the most


class Verdict(Enum):
    EXACT = "exact"
    REFUSED = "refused"  # 503 or 429 with Retry-After before anything was sent
    FAILED = "failed"  # an error of ours after a right beginning
    WRONG = "wrong"  # anything else: cut, hung, other text, another status


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request, on the clock of `time.monotonic`."""

    request: str
    began: float
    ended: float
    verdict: Verdict
    detail: str = ""


class Broken(Exception):
    """What a client must never see."""


@dataclass
class Load:
    """`clients` threads with requests drawn from `seed`. A context manager: on leaving, all have ended."""

    served: Served
    seed: int
    clients: int = 4
    outcomes: list[Outcome] = field(default_factory=list)

    def __enter__(self) -> "Load":
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(f"{self.seed}/{i}"),), daemon=True)
            for i in range(self.clients)
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._stopping.set()
        deadline = time.monotonic() + _DEADLINE_S + 10
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                now = time.monotonic()
                self.outcomes.append(Outcome("one that never ended", now, now, Verdict.WRONG, "hung"))

    def counts(self) -> Counter[str]:
        return Counter(outcome.verdict.value for outcome in list(self.outcomes))

    def _run(self, chance: random.Random) -> None:
        while not self._stopping.is_set():
            self.outcomes.append(self._ask(chance))
            self._stopping.wait(chance.uniform(0, _AGAIN_S))

    def _ask(self, chance: random.Random) -> Outcome:
        how = chance.choice(["stream", "choices", "plain", "python", "sampled"])
        start, tokens = chr(chance.choice(PRINTABLE)), chance.randint(_SHORTEST, _LONGEST)
        began = time.monotonic()
        verdict, detail = Verdict.EXACT, ""
        try:
            if how == "python":
                self._python(start, tokens)
            else:
                body: dict[str, Any] = {"model": MODEL, "prompt": start, "max_tokens": tokens, "seed": 5}
                body |= {"temperature": 1.0} if how == "sampled" else {}
                body |= {"n": 2} if how == "choices" else {}
                verdict, detail = self._plain(body) if how == "plain" else self._stream(body)
        except (Unavailable, GenerationFailed) as error:
            verdict, detail = Verdict.FAILED, str(error)
        except Exception as error:
            verdict, detail = Verdict.WRONG, repr(error)
        return Outcome(f"{how} {tokens} from {start!r}", began, time.monotonic(), verdict, detail)

    def _python(self, start: str, tokens: int) -> None:
        text = ""
        for delta in self.served.client.stream(start, SamplingParams(max_tokens=tokens)):
            text += delta.text
            _check(text, start, tokens)
        _check(text, start, tokens, whole=True)

    def _plain(self, body: dict[str, Any]) -> tuple[Verdict, str]:
        response = httpx.post(f"{self.served.url}/v1/completions", json=body, timeout=_DEADLINE_S)
        if response.status_code != 200:
            return _refused(response)
        for choice in response.json()["choices"]:
            _check(choice["text"], body["prompt"], body["max_tokens"], whole=True)
        return Verdict.EXACT, ""

    def _stream(self, body: dict[str, Any]) -> tuple[Verdict, str]:
        texts = [""] * body.get("n", 1)
        url = f"{self.served.url}/v1/completions"
        with httpx.stream("POST", url, json={**body, "stream": True}, timeout=_DEADLINE_S) as response:
            if response.status_code != 200:
                response.read()
                return _refused(response)
            for event in _events(response):
                if "error" in event:
                    return Verdict.FAILED, _clear(event["error"])
                for choice in event["choices"]:
                    texts[choice["index"]] += choice["text"]
                    _check(texts[choice["index"]], body["prompt"], body["max_tokens"])
        for text in texts:
            _check(text, body["prompt"], body["max_tokens"], whole=True)
        return Verdict.EXACT, ""


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """All of a stream, which ends with `[DONE]` or with an error."""
    event: dict[str, Any] = {}
    for line in response.iter_lines():
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            yield event
    if "error" not in event:
        raise Broken("the stream ended without [DONE] and without an error")


def _check(text: str, start: str, tokens: int, *, whole: bool = False) -> None:
    right = counted(start, tokens)
    if (text != right) if whole else not right.startswith(text):
        at = next((i for i, (a, b) in enumerate(zip(text, right, strict=False)) if a != b), len(text))
        raise Broken(f"{len(text)} of {tokens} characters, wrong from {at}: {text[at : at + 20]!r}")


def _refused(response: httpx.Response) -> tuple[Verdict, str]:
    message = _clear(response.json()["error"])
    if response.status_code not in (429, 503) or int(response.headers.get("retry-after", 0)) < 1:
        raise Broken(f"HTTP {response.status_code}: {message}")
    return Verdict.REFUSED, message


def _clear(error: dict[str, Any]) -> str:
    if error["type"] not in ("service_unavailable_error", "rate_limit_error") or not error["message"]:
        raise Broken(f"no clear error: {error}")
    return str(error["message"])
