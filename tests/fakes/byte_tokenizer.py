"""A tokenizer of 256 bytes and a few specials: every emoji and every stop string spans several tokens.

Token id b is byte b. `bos` adds a BOS before raw prompts, as Llama's tokenizers do.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

BOS_ID, EOS_ID, START_ID, END_ID = 256, 257, 258, 259
SPECIALS = {"<bos>": BOS_ID, "<eos>": EOS_ID, "<start>": START_ID, "<end>": END_ID}
_SPECIAL = re.compile(f"({'|'.join(SPECIALS)})")

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<start>{{ message['role'] }}\n{{ message['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant\n{% endif %}"
)
SPECIAL_TOKENS = {"bos_token": "<bos>", "eos_token": "<eos>"}


@dataclass(frozen=True)
class ByteTokenizer:
    """Implements `cluster.text.tokenizer.Tokenizer`."""

    bos: bool = True
    vocab_size: int = 256 + len(SPECIALS)
    eos_token_ids: tuple[int, ...] = (EOS_ID,)

    def fewest_tokens(self, text: bytes) -> int:
        return -(-len(text) // max(map(len, SPECIALS)))

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        ids = [BOS_ID] if add_special_tokens and self.bos else []
        for piece in _SPECIAL.split(text):
            ids += [SPECIALS[piece]] if piece in SPECIALS else list(piece.encode())
        return tuple(ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if 0 <= token_id < 256 else b""

    def special_text(self, token_id: int) -> str:
        return next((text for text, special_id in SPECIALS.items() if special_id == token_id), "")
