"""Log-probabilities on their way from the ranks' columns to deltas: those of new tokens, and those of a prompt.

Knows tokens and scores; knows nothing of sequences, plans, text or how deltas travel.
"""

from collections.abc import Sequence

from cluster.generation import TokenLogprob
from workers.protocol import Logprobs


def token_logprobs(token_ids: Sequence[int], found: Logprobs) -> tuple[TokenLogprob, ...]:
    """One entry for each of `token_ids`, to which `found` belongs; it may tell of more tokens after them."""
    count = found.num_top
    alternatives = list(zip(found.top_ids, found.top, strict=True))
    return tuple(
        TokenLogprob(token_id, logprob, tuple(alternatives[row * count : (row + 1) * count]))
        for row, (token_id, logprob) in enumerate(zip(token_ids, found.chosen, strict=False))
    )


class PromptLogprobs:
    """Those of one prompt, gathered from the steps that compute it, in order and each once.

    After a preemption the prompt is computed anew and what is known is told again; that is left out.
    """

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        self._token_ids = prompt_token_ids
        self._known: list[TokenLogprob | None] = [None]  # nothing predicts the first token

    @property
    def complete(self) -> bool:
        return len(self._known) == len(self._token_ids)

    def add(self, found: Logprobs) -> None:
        """Raises ValueError when tokens are missing between what is known and `found`, or do not exist."""
        known, end = len(self._known), found.start + len(found.chosen)
        if not 1 <= found.start <= known or end > len(self._token_ids):
            raise ValueError(
                f"log-probabilities of prompt tokens {found.start} to {end}; {known} of {len(self._token_ids)} "
                "are known"
            )
        self._known += token_logprobs(self._token_ids[found.start : end], found)[known - found.start :]

    def take(self) -> tuple[TokenLogprob | None, ...]:
        return tuple(self._known)
