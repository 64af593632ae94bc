"""What a model says, from the ranks put together and from the judge: logits of a prompt, and greedy tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model_shards.weights.loader import load_model
from tests.fakes.plain_attention import PlainAttention
from tests.fakes.reference import reference_model
from tests.fakes.thread_group import ThreadGroup, run_ranks

TOLERANCE = 1e-4
TOKENS = torch.tensor([0, 7, 500, 1002, 501, 502, 3, 3, 999, 12, 60, 333])
NUM_GREEDY = 8

Variants = dict[str, tuple[str, dict[str, Any]]]  # family and overrides, by name


@dataclass(frozen=True)
class Judged:
    """A checkpoint, and what `transformers` says of it after `TOKENS`."""

    folder: Path
    logits: Tensor
    greedy: list[int]

    @classmethod
    def of(cls, folder: Path) -> "Judged":
        reference = reference_model(folder)
        return cls(folder, reference_logits(reference, TOKENS), reference_greedy(reference, TOKENS, NUM_GREEDY))

    def check(self, ranks: int) -> None:
        """So many ranks say the same."""
        assert self.logits.abs().max() > 1.0
        torch.testing.assert_close(sharded_logits(self.folder, ranks, TOKENS), self.logits, rtol=0, atol=TOLERANCE)
        assert sharded_greedy(self.folder, ranks, TOKENS, NUM_GREEDY) == self.greedy


def random_prompts(count: int, vocab_size: int = 1003) -> list[Tensor]:
    """Seeded, of 1 to 24 tokens."""
    generator = torch.Generator().manual_seed(7)
    lengths = torch.randint(1, 25, (count,), generator=generator).tolist()
    return [torch.randint(0, vocab_size, (length,), generator=generator) for length in lengths]


def sharded_logits(path: Path, ranks: int, tokens: Tensor) -> Tensor:
    """Logits of every position, put together from the ranks in their order."""
    return sharded_logits_of(path, ranks, [tokens])


def sharded_logits_of(path: Path, ranks: int, prompts: Sequence[Tensor]) -> Tensor:
    """The same for several prompts, one after the other on the same ranks: [tokens of all prompts, vocabulary]."""

    def work(group: ThreadGroup) -> Tensor:
        model = load_model(path, group, device=torch.device("cpu"), dtype=torch.float32)
        parts = []
        for tokens in prompts:
            hidden = model.forward(tokens, torch.arange(len(tokens)), PlainAttention())
            parts.append(model.local_logits(hidden))
            assert parts[-1].shape == (len(tokens), model.local_vocab_size)
            assert parts[-1].dtype == torch.float32
        return torch.cat(parts)

    return torch.cat(run_ranks(ranks, work), dim=1)


def sharded_greedy(path: Path, ranks: int, prompt: Tensor, count: int) -> list[int]:
    """The `count` most likely tokens after `prompt`, each computed from the cache of those before."""

    def work(group: ThreadGroup) -> list[int]:
        model = load_model(path, group, device=torch.device("cpu"), dtype=torch.float32)
        attention = PlainAttention()
        tokens, position, found = prompt, 0, []
        for _ in range(count):
            positions = torch.arange(position, position + len(tokens))
            logits = model.local_logits(model.forward(tokens, positions, attention)[-1:])[0]
            best = torch.stack((logits.max().double(), (logits.argmax() + model.local_vocab_start).double()))
            offers = group.all_gather(best)
            tokens = offers[offers[:, 0].argmax(), 1].long().view(1)
            position += len(positions)
            found.append(int(tokens))
        return found

    return run_ranks(ranks, work)[0]


def reference_logits(model: Any, tokens: Tensor) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(tokens.unsqueeze(0)).logits[0]
    return logits


def reference_greedy(model: Any, prompt: Tensor, count: int) -> list[int]:
    """Without a cache, so that nothing but the model is judged by."""
    tokens = prompt
    for _ in range(count):
        tokens = torch.cat((tokens, reference_logits(model, tokens)[-1:].argmax(dim=-1)))
    return tokens[len(prompt) :].tolist()
