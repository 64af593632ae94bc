"""Prompts of a wanted length that share no prefix. Knows words; knows nothing of tokenizers or HTTP."""

import random
from collections.abc import Sequence

# Short common words: most byte-pair vocabularies hold each of them, with its leading space, as one token.
_TEXT = """
time year people way day man thing woman life child world school state family student group country
problem hand part place case week company system program question work number night point home water room
mother area money story fact month lot right study book eye job word business issue side kind head house
service friend father power hour game line end member law car city name president team minute idea body
information back parent face others level office door health person art war history party result change
morning reason research girl guy moment air teacher force education foot boy age policy music market
sense nation plan college interest death experience effect use class control field development role
effort rate heart drug show leader light voice wife police mind price report decision son view
relationship town road arm difference value building action season society tax director position player
record paper space ground form event official matter center couple site project activity star table need
court oil situation cost industry figure street image phone data picture practice piece land product
doctor wall patient worker news test movie north love support technology step baby computer type
attention film tree source organization hair look window culture chance brother energy period course
summer hotel model author garden mountain river winter animal bottle engine planet silver yellow
"""
_WORDS = tuple(_TEXT.split())


def random_words(seed: int, index: int, count: int) -> str:
    """`count` words that depend on (seed, index) alone, so that no two prompts share a block of a prefix cache."""
    if count < 1:
        raise ValueError(f"a prompt needs at least 1 word, not {count}")
    draws = random.Random(f"{seed}/{index}")
    return " ".join(draws.choices(_WORDS, k=count))


def words_for_tokens(wanted_tokens: int, trials: Sequence[tuple[int, int]]) -> int:
    """Words that give about `wanted_tokens`, from trials of (words sent, prompt tokens the server counted).

    With two trials of different length the fixed part (a beginning-of-sequence token, a chat template) is told
    apart from the tokens a word costs. Without usable trials a word counts as one token.
    """
    known = [(words, tokens) for words, tokens in trials if words > 0 and tokens > 0]
    if not known:
        return max(1, wanted_tokens)
    (few, fewer_tokens), (many, more_tokens) = min(known), max(known)
    if many == few or more_tokens <= fewer_tokens:
        return max(1, round(wanted_tokens * many / more_tokens))
    per_word = (more_tokens - fewer_tokens) / (many - few)
    fixed = fewer_tokens - per_word * few
    return max(1, round((wanted_tokens - fixed) / per_word))
