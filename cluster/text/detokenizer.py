"""Tokens to text as they come: whole characters only.

Knows bytes and UTF-8; knows nothing of stop strings or requests. `tokenizers.decoders.DecodeStream` is not used:
it stays silent while its text ends in U+FFFD, so one invalid byte would hold a stream back for good.
"""

import codecs
from collections.abc import Iterable

from cluster.text.tokenizer import Tokenizer

_new_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """One running text.

    Invariant: what was returned so far, in however many pieces, is the whole text up to the last complete
    character. Bytes that can never become one give U+FFFD once, at the moment that is certain.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._decoder = _new_decoder("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that `token_ids` complete; empty while a character is still open."""
        return self._decoder.decode(b"".join(map(self._token_bytes, token_ids)))

    def finish(self) -> str:
        """What an unfinished character leaves: U+FFFD, or nothing."""
        return self._decoder.decode(b"", final=True)
