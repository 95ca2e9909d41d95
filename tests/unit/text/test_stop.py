"""Stop strings in streamed text, against a search that looks at every end of the text."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.coordinator.text.stop import StopMatcher
from lamina.spec.errors import InvalidRequest

FUZZED = settings(derandomize=True, deadline=None)


def naive(text: str, stops: list[str]) -> tuple[str, str | None]:
    """What is to be shown and the stop string found: the first end of the text that is one, the longest there."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


words = st.text("ab\n", min_size=1, max_size=5)


@FUZZED
@given(st.text("ab\n", max_size=40), st.lists(words, max_size=4), st.lists(st.integers(0, 40), max_size=12))
def test_equals_the_naive_search_however_the_text_is_cut(text: str, stops: list[str], cuts: list[int]) -> None:
    """The same answer for every way of cutting; what was shown never reaches into the stop string."""
    shown_in_all, expected = naive(text, stops)
    matcher = StopMatcher(stops)
    shown, matched = "", None
    for start, end in pairwise([0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]):
        emitted, matched = matcher.push(text[start:end])
        shown += emitted
        assert shown_in_all.startswith(shown)
    assert matched == expected
    assert shown + matcher.flush() == shown_in_all


@FUZZED
@given(st.text("ab", max_size=30), st.lists(words, min_size=1, max_size=4))
def test_holds_back_only_what_may_become_a_stop_string(text: str, stops: list[str]) -> None:
    """What is held back begins a stop string: latency is not given away."""
    matcher = StopMatcher(stops)
    shown = ""
    for index, char in enumerate(text):
        emitted, matched = matcher.push(char)
        if matched is not None:
            return
        shown += emitted
        held = text[len(shown) : index + 1]
        assert any(stop.startswith(held) for stop in stops)


def test_partial_match_that_fails_is_shown() -> None:
    """By hand, with the usual stop string."""
    matcher = StopMatcher(["\nUser:"])
    assert matcher.push("Hello\nUs") == ("Hello", None)
    assert matcher.push("ers\n") == ("\nUsers", None)
    assert matcher.push("User: x") == ("", "\nUser:")
    assert matcher.push("more") == ("", "\nUser:")
    assert matcher.flush() == ""


def test_no_stop_strings_hold_nothing_back() -> None:
    """The common case costs nothing."""
    matcher = StopMatcher([])
    assert matcher.push("abc") == ("abc", None)
    assert matcher.flush() == ""


def test_an_empty_stop_string_is_refused() -> None:
    """It would match everywhere."""
    with pytest.raises(InvalidRequest, match="a stop string is empty"):
        StopMatcher(["a", ""])
