"""What a full KV block holds, as a value: its tokens and all that came before them.

The keys and values of a token depend on every token before it, so a block is known by its whole text. A text is a
chain: a root, which names what sets requests apart that must not share, and then one link a block. Each link has a
hash over its tokens and the hash before it, which finds candidates; `same_text` decides, token by token.

Knows tokens and hashes; knows nothing of blocks' numbers, sequences or plans.
"""

import hashlib
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache

BlockHash = Callable[[bytes], bytes]


def digest(data: bytes) -> bytes:
    """The same in every process: unlike Python's hash, it has no seed."""
    return hashlib.sha256(data).digest()


@dataclass(slots=True, eq=False)
class BlockText:
    """All the text up to the end of one full block. Links are shared: equal texts are often one object.

    Never changed once made. Not frozen, which would cost a third of the making.
    """

    before: "BlockText | None" = field(repr=False)  # None: this is a root
    content: tuple[int, ...] | tuple[tuple[str, str], ...]  # a block's tokens, or the fields of a root
    hash: bytes


def root_text(fields: Mapping[str, str], block_hash: BlockHash = digest) -> BlockText:
    """Before the first block. Texts with other fields, by name or by value, are other texts.

    A field that a request does not have is left out; it differs from one with an empty value.
    """
    content = tuple(sorted(fields.items()))
    encoded = [part.encode() for field in content for part in field]
    return BlockText(None, content, block_hash(b"".join(struct.pack("<Q", len(part)) + part for part in encoded)))


def next_text(before: BlockText, token_ids: tuple[int, ...], block_hash: BlockHash = digest) -> BlockText:
    """`before`, and one full block after it."""
    return BlockText(before, token_ids, block_hash(before.hash + _packing(len(token_ids)).pack(*token_ids)))


@cache
def _packing(num_tokens: int) -> struct.Struct:
    return struct.Struct(f"<{num_tokens}q")


def same_text(one: BlockText | None, other: BlockText | None) -> bool:
    """Whether two texts are equal in every token and field, whatever their hashes. A shared link settles it."""
    while one is not other:
        if one is None or other is None or one.content != other.content:
            return False
        one, other = one.before, other.before
    return True
