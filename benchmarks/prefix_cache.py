"""How much sooner the first token comes when the prompt's beginning is in the prefix cache.

    python -m benchmarks.prefix_cache [--model smollm2-135m] [--tp 2] [--shared 1000] [--own 16] [--repeat 10]

One request at a time and of one token, from Python, so the time of a request is its time to first token (TTFT). In
turn: a prompt that nothing shares with any before, and one that differs from it in its last `own` tokens alone.
Medians, and the number of prompt tokens that were found in the cache.
"""

import argparse
import random
import statistics
import time

from cluster.generation import SamplingParams
from cluster.llm import LLM

ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
TOKEN_IDS = range(1000, 5000)


def ask(llm: LLM, prompt: list[int]) -> tuple[float, int]:
    """Milliseconds to the first token, and tokens that were in the cache."""
    started = time.perf_counter()
    [completion] = llm.generate([tuple(prompt)], ONE_TOKEN)
    return (time.perf_counter() - started) * 1e3, completion.num_cached_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--shared", type=int, default=1000, help="tokens that two prompts begin with")
    parser.add_argument("--own", type=int, default=16, help="tokens that follow, of each its own")
    parser.add_argument("--repeat", type=int, default=10)
    given = parser.parse_args()
    dice = random.Random(0)
    taken: dict[str, list[tuple[float, int]]] = {"without a hit": [], "with a hit": []}
    with LLM(given.model, tp=given.tp, device="cpu") as llm:
        for turn in range(-1, given.repeat):  # the first warms up
            shared = dice.choices(TOKEN_IDS, k=given.shared)
            for figures in taken.values():
                figure = ask(llm, shared + dice.choices(TOKEN_IDS, k=given.own))
                if turn >= 0:
                    figures.append(figure)
    print(f"{given.model}, TP={given.tp}, {given.shared} shared and {given.own} own tokens, {given.repeat} times")
    medians = [statistics.median(milliseconds for milliseconds, _ in figures) for figures in taken.values()]
    for (name, figures), median in zip(taken.items(), medians, strict=True):
        print(f"{name:14} TTFT {median:8.1f} ms, {min(cached for _, cached in figures)} tokens cached")
    print(f"{medians[0] / medians[1]:.1f} times sooner")


if __name__ == "__main__":
    main()
