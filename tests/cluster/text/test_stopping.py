"""Stop strings: nothing of one leaks, nothing else is lost, and the cuts between pieces do not matter."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.text.stopping import StopMatcher


def released(stop: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stop)
    shown = [matcher.push(piece) for piece in pieces]
    if matcher.matched is None:
        shown.append(matcher.finish())
    return shown, matcher.matched


def by_definition(stop: list[str], text: str) -> tuple[str, str | None]:
    """The text up to the stop string that is complete first, character by character."""
    for end in range(1, len(text) + 1):
        complete = [string for string in stop if text[:end].endswith(string)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


@pytest.mark.parametrize(
    ("stop", "pieces", "shown", "matched"),
    [
        (["DEFGHIJ"], ["ABC", "DEF", "G", "HI", "J", "K"], "ABC", "DEFGHIJ"),
        (["aab"], list("aaabc"), "a", "aab"),  # the prefix repeats
        (["b"], ["abc"], "a", "b"),  # inside a piece
        (["abc", "b"], ["abc"], "a", "b"),  # the one that is complete first
        (["bc", "abc"], list("xabc"), "x", "abc"),  # both complete at once: the longer
        (["xyz"], ["ab", "xy"], "abxy", None),  # held back, and released at the end
        (["xyz"], ["ab", "xy", "!"], "abxy!", None),
        ([], ["anything"], "anything", None),
    ],
)
def test_known_cases(stop: list[str], pieces: list[str], shown: str, matched: str | None) -> None:
    texts, found = released(stop, pieces)
    assert ("".join(texts), found) == (shown, matched)


small_alphabet = st.text("ab", min_size=1, max_size=4)


@given(st.lists(small_alphabet, min_size=1, max_size=3), st.lists(st.text("abc", max_size=5), max_size=12))
def test_any_cut_gives_what_the_definition_says(stop: list[str], pieces: list[str]) -> None:
    texts, found = released(stop, pieces)
    assert ("".join(texts), found) == by_definition(stop, "".join(pieces))


@given(st.lists(small_alphabet, min_size=1, max_size=3), st.text("abc", max_size=20))
def test_what_cannot_match_is_released_at_once(stop: list[str], text: str) -> None:
    matcher = StopMatcher(stop)
    shown = ""
    for count, character in enumerate(text, start=1):
        shown += matcher.push(character)
        if matcher.matched is not None:
            break
        held = text[len(shown) : count]
        assert held == "" or any(string.startswith(held) for string in stop)


def test_nothing_comes_after_a_match() -> None:
    matcher = StopMatcher(["x"])
    assert (matcher.push("ax"), matcher.push("more")) == ("a", "")


@pytest.mark.parametrize("pieces", [["xab!y"], ["x", "a", "b", "!", "y"], ["xa", "b!y"]])
def test_the_match_itself_is_released_where_asked_and_nothing_after_it(pieces: list[str]) -> None:
    matcher = StopMatcher(["ab!", "b!!"], include_match=True)
    assert "".join(map(matcher.push, pieces)) == "xab!"
    assert matcher.matched == "ab!"
