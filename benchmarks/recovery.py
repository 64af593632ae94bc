"""What the death of a rank costs: how soon it is noticed, the outage by part, and whether any answer suffers.

Serves a model on CPU ranks of a Ray of its own. Again and again four clients stream at most 200 tokens, prompt
included, and at a random moment a random rank gets SIGKILL. Noticed: from the kill to the engine's decision.
Outage: the longest time in which no client got anything; worst: the longest for one client. The parts are the
engine's own (`EngineStats.last_outage`), from its last step before to the first token after. Every answer is
compared with the undisturbed one; a difference, or a request that ends in an error, makes the exit status 1.

    python -m benchmarks.recovery [--model smollm2-135m] [--tp 2] [--kills 20] [--seed 1] [--no-spare]
"""

import argparse
import itertools
import json
import os
import random
import signal
import socket
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from cluster.driver.local_ray import ensure_ray
from cluster.engine.outage import OutageReport
from tests.system.processes import all_of, title

PROMPTS = (
    "The capital of France is",
    "A list of ten animals and the sounds they make: the dog barks, the cat",
    "Once upon a time there was a small robot who wanted to learn how to paint, and every morning it",
    "Step by step, here is how to bake bread at home. First,",
)
OUTPUT_TOKENS = 170
RANK, SPARE = "ray::WorkerActor.run", "ray::SpareActor"
READY_WITHIN_S = 60.0
ENDS_WITHIN_S = 300.0


@dataclass
class Stream:
    """One client: what it got, and when."""

    index: int
    text: str = ""
    at: list[float] = field(default_factory=list)
    finish: str = "nothing"

    def read(self, url: str, model: str) -> None:
        body = {
            "model": model,
            "prompt": PROMPTS[self.index],
            "max_tokens": OUTPUT_TOKENS,
            "temperature": 0.8 if self.index % 2 else 0,
            "seed": self.index,
            "ignore_eos": True,
            "stream": True,
        }
        try:
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=ENDS_WITHIN_S) as response:
                response.raise_for_status()
                for line in response.iter_lines():
                    self._take(line.removeprefix("data: "))
        except httpx.HTTPError as error:
            self.finish = repr(error)

    def _take(self, data: str) -> None:
        if not data or data == "[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            self.finish = event["error"]["message"]
            return
        choice = event["choices"][0]
        self.at.append(time.monotonic())
        self.text += choice["text"]
        self.finish = choice["finish_reason"] or self.finish


class Round:
    """All clients at once."""

    def __init__(self, url: str, model: str) -> None:
        self.streams = [Stream(index) for index in range(len(PROMPTS))]
        self._threads = [
            threading.Thread(target=stream.read, args=(url, model), daemon=True) for stream in self.streams
        ]
        for thread in self._threads:
            thread.start()

    def wait_for(self, num_events: int) -> None:
        """Until so many have come in all, or everybody has finished."""
        while any(thread.is_alive() for thread in self._threads):
            if sum(len(stream.at) for stream in self.streams) >= num_events:
                return
            time.sleep(0.001)

    @property
    def num_open(self) -> int:
        return sum(thread.is_alive() for thread in self._threads)

    def end(self) -> list[str]:
        for thread in self._threads:
            thread.join(ENDS_WITHIN_S)
        return [stream.text if stream.finish == "length" else f"lost: {stream.finish}" for stream in self.streams]

    def outage_s(self) -> float:
        return longest_gap(sorted(moment for stream in self.streams for moment in stream.at))

    def worst_s(self) -> float:
        return max(longest_gap(stream.at) for stream in self.streams)


@dataclass
class Kill:
    """One, and what came of it. Seconds."""

    noticed_s: float
    outage_s: float
    worst_s: float
    parts: dict[str, float]
    in_flight: int
    lost: int
    different: int
    with_spare: bool


class Server:
    """The application on this process's Ray."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from ray import serve
        from ray.serve.config import HTTPOptions

        from cluster.application import DRIVER, build

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        serve.start(http_options=HTTPOptions(host="127.0.0.1", port=port))
        serve.run(build(settings), name="shardserve")
        self.url = f"http://127.0.0.1:{port}"
        self.model = str(settings["served_model_name"])
        self._driver: Any = serve.get_deployment_handle(DRIVER, "shardserve")

    def outage_after(self, moment: float) -> OutageReport:
        """The report of the outage that began then, once it is over. Processes of a machine share the clock."""
        deadline = time.monotonic() + READY_WITHIN_S
        while time.monotonic() < deadline:
            report: OutageReport | None = self._driver.stats.remote().result(timeout_s=30).last_outage
            if report is not None and report.noticed_at > moment:
                return report
            time.sleep(0.05)
        raise SystemExit(f"no outage was over within {READY_WITHIN_S:g} s")

    def wait_ready(self, ranks: int, spare: bool) -> bool:
        """Until the ranks run, and a spare waits if there is to be one. Whether it does."""
        deadline = time.monotonic() + READY_WITHIN_S
        while len(all_of(RANK)) != ranks or not self._is_healthy():
            if time.monotonic() > deadline:
                raise SystemExit(f"{len(all_of(RANK))} of {ranks} ranks run, and health is off")
            time.sleep(0.05)
        while spare and time.monotonic() < deadline:
            if any(title(pid) == SPARE for pid in all_of(SPARE)):  # one that imports has a longer title
                return True
            time.sleep(0.05)
        return False

    def _is_healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=10).status_code == 200
        except httpx.HTTPError:
            return False


def longest_gap(moments: Sequence[float]) -> float:
    return max((later - earlier for earlier, later in itertools.pairwise(moments)), default=0.0)


def kill_once(server: Server, expected: list[str], dice: random.Random, number: int, args: Any) -> Kill:
    with_spare = server.wait_ready(args.tp, args.spare)
    events = int(dice.uniform(0.05, 0.8) * len(PROMPTS) * OUTPUT_TOKENS)
    rank = dice.choice(all_of(RANK))
    clients = Round(server.url, server.model)
    clients.wait_for(events)
    in_flight = clients.num_open
    killed_at = time.monotonic()
    os.kill(rank, signal.SIGKILL)
    answers = clients.end()
    report = server.outage_after(killed_at)
    kill = Kill(
        noticed_s=report.noticed_at - killed_at,
        outage_s=clients.outage_s(),
        worst_s=clients.worst_s(),
        parts=dict(report.parts),
        in_flight=in_flight,
        lost=sum(answer.startswith("lost: ") for answer in answers),
        different=sum(answer != right for answer, right in zip(answers, expected, strict=True)),
        with_spare=with_spare,
    )
    parts = ", ".join(f"{name} {seconds * 1000:.0f}" for name, seconds in kill.parts.items())
    print(
        f"kill {number}/{args.kills} after {events} chunks: noticed {kill.noticed_s * 1000:.0f} ms, outage "
        f"{kill.outage_s * 1000:.0f}, worst {kill.worst_s * 1000:.0f} ({parts}); {in_flight} in flight, "
        f"{kill.lost} lost, {kill.different} different{'' if with_spare else '; no spare'}",
        flush=True,
    )
    return kill


def summarize(kills: Sequence[Kill]) -> None:
    names = list(dict.fromkeys(name for kill in kills for name in kill.parts))
    rows = {
        "noticed": [kill.noticed_s for kill in kills],
        "outage": [kill.outage_s for kill in kills],
        "worst": [kill.worst_s for kill in kills],
        **{f"  {name}": [kill.parts.get(name, 0.0) for kill in kills] for name in names},
    }
    print(f"\n{'ms':<18}{'p50':>8}{'p90':>8}{'p99':>8}{'max':>8}")
    for name, seconds in rows.items():
        figures = (quantile(seconds, 0.5), quantile(seconds, 0.9), quantile(seconds, 0.99), max(seconds))
        print(f"{name:<18}" + "".join(f"{figure * 1000:>8.0f}" for figure in figures))
    print(
        f"\n{len(kills)} kills, {sum(kill.with_spare for kill in kills)} with a spare; "
        f"{sum(kill.in_flight for kill in kills)} requests in flight, {sum(kill.lost for kill in kills)} lost, "
        f"{sum(kill.different for kill in kills)} different"
    )


def quantile(values: Sequence[float], share: float) -> float:
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=1000, method="inclusive")[round(share * 1000) - 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-spare", dest="spare", action="store_false")
    args = parser.parse_args()
    settings = {
        "model": args.model,
        "served_model_name": "measured",
        "tensor_parallel_size": args.tp,
        "device": "cpu",
        "max_recoveries": 2 * args.kills + 10,
        "spare": args.spare,
    }
    kills: list[Kill] = []
    with ensure_ray(args.tp):
        server = Server(settings)
        print(f"serving {args.model} on {args.tp} ranks at {server.url}", flush=True)
        server.wait_ready(args.tp, spare=False)
        expected = Round(server.url, server.model).end()
        undisturbed = Round(server.url, server.model)
        for first, second in zip(expected, undisturbed.end(), strict=True):
            if first != second or first.startswith("lost: "):
                raise SystemExit(f"undisturbed rounds fail or differ:\n{first!r}\n{second!r}")
        print(f"undisturbed: longest gap {undisturbed.worst_s() * 1000:.0f} ms", flush=True)
        dice = random.Random(args.seed)
        try:
            for number in range(1, args.kills + 1):
                kills.append(kill_once(server, expected, dice, number, args))
        finally:
            if kills:
                summarize(kills)
            from ray import serve

            serve.shutdown()
    sys.exit(any(kill.lost or kill.different for kill in kills))


if __name__ == "__main__":
    main()
