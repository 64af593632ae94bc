"""SmolLM2-135M in float32: greedy tokens are transformers' on the same file, for every number of ranks.

The ranks are threads. transformers runs once, all prompts in one padded batch; ours run one at a time and
together.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.text.tokenizer import load_tokenizer
from model_shards.weights.loader import load_model
from tests.fakes.thread_group import ThreadGroup, run_ranks
from tests.workers.plans import Job, PlanMaker, run_to_the_end, worker_config
from workers.runner import Runner

pytestmark = [pytest.mark.smollm2, pytest.mark.timeout(1800)]  # some 3000 steps, and the ranks may share a core

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at a temperature of",
    "1, 1, 2, 3, 5, 8,",
    "Dear Sir or Madam,\n\nI am writing to",
    "The three states of matter are",
    "Q: Why is the sky blue?\nA:",
    "In 1969, the first human",
    "A recipe for pancakes:\n1.",
    "<|im_start|>user\nName a colour.<|im_end|>\n<|im_start|>assistant\n",
    "To be, or not to be, that is the question: whether 'tis nobler in the mind to suffer the slings",
)
TOKENS = 64
TOGETHER = 32
NEIGHBOUR_TOKENS = 20  # of those that only keep the batch full: they leave while the others go on


@pytest.fixture(scope="session")
def prompts(smollm2_path: Path) -> list[list[int]]:
    tokenizer = load_tokenizer(smollm2_path)
    return [list(tokenizer.encode(text, add_special_tokens=True)) for text in PROMPTS]


@pytest.fixture(scope="session")
def expected(smollm2_reference: Any, prompts: list[list[int]]) -> list[list[int]]:
    """What transformers generates for each prompt."""
    width = max(map(len, prompts))
    padded = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    generated = smollm2_reference.generate(
        padded, attention_mask=mask, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    tokens: list[list[int]] = generated[:, width:].tolist()
    return tokens


def generate(smollm2_path: Path, num_ranks: int, batches: list[dict[int, Job]]) -> list[dict[int, list[int]]]:
    """The tokens of each batch, run one after another on the same ranks."""

    def work(group: ThreadGroup) -> list[dict[int, list[int]]]:
        model = load_model(smollm2_path, group, device=torch.device("cpu"), dtype=torch.float32)
        config = worker_config(tensor_parallel_size=num_ranks)
        outcomes = []
        for batch in batches:
            maker = PlanMaker.of_copies(batch, config, num_blocks=512)
            outcomes.append(run_to_the_end(Runner(model, group, config, 512), maker, chunk=lambda: 16))
        return outcomes

    outcomes = run_ranks(num_ranks, work)
    assert all(outcome == outcomes[0] for outcome in outcomes)
    return outcomes[0]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_greedy_tokens_are_those_of_transformers(
    smollm2_path: Path, prompts: list[list[int]], expected: list[list[int]], num_ranks: int
) -> None:
    alone = [{number: Job(prompt, TOKENS)} for number, prompt in enumerate(prompts)]
    together = {
        number: Job(prompts[number % len(prompts)], TOKENS if number < len(prompts) else NEIGHBOUR_TOKENS)
        for number in range(TOGETHER)
    }
    *one_at_a_time, all_at_once = generate(smollm2_path, num_ranks, [*alone, together])
    for number, outcome in enumerate(one_at_a_time):
        assert outcome[number] == expected[number], PROMPTS[number]
    for number, tokens in all_at_once.items():
        assert tokens == expected[number % len(prompts)][: len(tokens)], PROMPTS[number % len(prompts)]
