"""How likely tokens were: log-softmax of a row of logits, for one token and for the likeliest.

Of the logits as the model gives them, as OpenAI and vLLM do: temperature, penalties and filters do not show. Each
row is computed alone, so its bits do not depend on the rows beside it.

Knows rows of numbers; knows nothing of ranks, sequences or settings.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from workers.protocol import Logprobs
from workers.sampling.distribution import FloatRow, greatest


@dataclass(frozen=True, slots=True)
class TokenScore:
    """The log-probability of a token, and the likeliest ids in its place with theirs."""

    logprob: float
    top: tuple[tuple[int, float], ...]


def score(
    logits: FloatRow,  # [vocabulary]
    token_id: int,
    num_top: int,
) -> TokenScore:
    """Raises IndexError for an id that is not in the vocabulary."""
    likeliest = logits.max()
    total = np.exp(logits - likeliest).sum(dtype=np.float64)
    normaliser = float(likeliest) + float(np.log(total))

    def logprob(chosen: int) -> float:
        return float(np.float32(float(logits[chosen]) - normaliser))

    count = min(num_top, len(logits))
    ids = greatest(logits, count).tolist() if count else []
    return TokenScore(logprob(token_id), tuple((each, logprob(each)) for each in ids))


def columns(start: int, scores: Sequence[TokenScore]) -> Logprobs:
    """The scores of consecutive tokens, all with as many alternatives, as they travel."""
    alternatives = [pair for each in scores for pair in each.top]
    return Logprobs(
        start,
        tuple(each.logprob for each in scores),
        len(scores[0].top),
        tuple(token_id for token_id, _ in alternatives),
        tuple(logprob for _, logprob in alternatives),
    )
