"""Which tokens a text shows: log-probabilities that wait until the text of their token is released.

Knows tokens by where they begin in the text; knows nothing of stop strings or of how text is made.
"""

from collections import deque

from cluster.generation import TokenLogprob


class ShownTokens:
    """One running text.

    Invariant: a token is shown once a character at or after its beginning is. So one that a stop string cuts off
    whole never is, and what is shown does not depend on how the text was cut into pieces.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, TokenLogprob]] = deque()
        self._num_characters = 0  # released so far

    def add(self, offset: int, logprob: TokenLogprob) -> None:
        """A token that begins after `offset` characters; offsets never fall."""
        self._waiting.append((offset, logprob))

    def release(self, num_characters: int, *, all_text: bool = False) -> list[tuple[int, TokenLogprob]]:
        """The tokens that `num_characters` more characters show; with `all_text`, those without any text, too."""
        self._num_characters += num_characters
        shown = []
        while self._waiting and (all_text or self._waiting[0][0] < self._num_characters):
            shown.append(self._waiting.popleft())
        return shown
