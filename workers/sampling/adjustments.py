"""What changes a row of logits before its token is chosen: biases, penalties, then masks.

The order and the meaning are the field's: transformers' `SequenceBiasLogitsProcessor` and
`RepetitionPenaltyLogitsProcessor`, OpenAI's frequency and presence penalties, transformers'
`MinNewTokensLengthLogitsProcessor` and `NoBadWordsLogitsProcessor`. Everything follows from the tokens of the
sequence, so it is the same after a preemption or a replay.

Knows a row of numbers and the tokens before it; knows nothing of ranks, temperatures or random numbers.
"""

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np

from workers.errors import ProtocolError
from workers.protocol import Adjustments, NewSequence
from workers.sampling.distribution import FloatRow, IdRow


def adjust(
    logits: FloatRow,  # [vocabulary]
    adjustments: Adjustments,
    token_ids: Sequence[int],  # all of the sequence so far
    num_prompt_tokens: int,
) -> FloatRow:  # [vocabulary], a copy
    """The logits to choose from. At least one of them is finite if one of `logits` is."""
    adjusted = logits.copy()
    for token_id, bias in adjustments.logit_bias:
        adjusted[token_id] += np.float32(bias)
    tokens = np.asarray(token_ids, dtype=np.int64)
    _penalise(adjusted, adjustments, tokens, tokens[num_prompt_tokens:])
    if adjustments.allowed_token_ids is not None:
        _allow_only(adjusted, adjustments.allowed_token_ids)
    if len(token_ids) - num_prompt_tokens < adjustments.min_tokens:
        _forbid(adjusted, adjustments.stop_token_ids)
    if adjustments.bad_words:
        _forbid(adjusted, [word[-1] for word in adjustments.bad_words if _would_complete(word, tokens)])
    return adjusted


def check_token_ids(new: NewSequence, vocab_size: int) -> None:
    """Raises `ProtocolError` for an id that is no column of the logits: it would read or write beside them."""
    adjustments = new.sampling.adjustments or Adjustments()
    ids: dict[str, Iterable[int]] = {
        "token_ids": new.token_ids,
        "logit_bias": (token_id for token_id, _ in adjustments.logit_bias),
        "allowed_token_ids": adjustments.allowed_token_ids or (),
        "stop_token_ids": adjustments.stop_token_ids,
        "bad_words": chain.from_iterable(adjustments.bad_words),
    }
    for name, values in ids.items():
        worst = max(values, default=0)
        if worst >= vocab_size:
            raise ProtocolError(
                f"sequence {new.sequence_id} names token {worst} in {name}; the vocabulary has {vocab_size}"
            )
    if adjustments.allowed_token_ids == () or not all(adjustments.bad_words):
        raise ProtocolError(f"sequence {new.sequence_id} allows no token, or forbids a word without tokens")
    if adjustments.repetition_penalty <= 0:
        raise ProtocolError(
            f"sequence {new.sequence_id} has a repetition_penalty of {adjustments.repetition_penalty}"
        )


def _penalise(logits: FloatRow, adjustments: Adjustments, tokens: IdRow, output: IdRow) -> None:
    if adjustments.repetition_penalty != 1:
        penalty = np.float32(adjustments.repetition_penalty)
        seen = logits[tokens]  # a token that occurs twice is written twice, with the same value
        logits[tokens] = np.where(seen < 0, seen * penalty, seen / penalty)
    frequency, presence = adjustments.frequency_penalty, adjustments.presence_penalty
    if (frequency or presence) and len(output):
        ids, counts = np.unique(output, return_counts=True)
        logits[ids] -= np.float32(frequency) * counts.astype(np.float32) + np.float32(presence)


def _allow_only(logits: FloatRow, ids: Sequence[int]) -> None:
    allowed = np.asarray(ids, dtype=np.int64)
    kept = logits[allowed]
    if kept.max() > -np.inf:
        logits.fill(-np.inf)
        logits[allowed] = kept


def _forbid(logits: FloatRow, ids: Sequence[int]) -> None:
    """Mask `ids`, unless that would leave nothing: a sequence that lives must go on."""
    if not ids:
        return
    forbidden = np.asarray(ids, dtype=np.int64)
    before = logits[forbidden]
    logits[forbidden] = -np.inf
    if logits.max() == -np.inf:
        logits[forbidden] = before


def _would_complete(word: tuple[int, ...], tokens: IdRow) -> bool:
    """Whether the text ends with all of `word` but its last token."""
    start = len(tokens) - len(word) + 1
    return start >= 0 and tuple(tokens[start:]) == word[:-1]
