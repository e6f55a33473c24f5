from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llmcore.text.stops import StopMatcher, StopStrings


def run(stops: list[str], parts: list[str], *, keep: bool = False) -> tuple[list[str], str | None]:
    """What each part shows, and the stop found; feeding ends there."""
    matcher = StopMatcher(StopStrings(stops), keep=keep)
    shown = []
    for part in parts:
        shown.append(matcher.feed(part))
        if matcher.found is not None:
            return shown, matcher.found
    shown.append(matcher.flush())
    return shown, None


@pytest.mark.parametrize(
    ("stops", "parts", "shown", "found"),
    [
        (["stop"], ["a st", "op b"], ["a ", ""], "stop"),
        (["stop"], ["a st", "ar"], ["a ", "star", ""], None),
        (["stop"], ["no st"], ["no ", "st"], None),
        (["\n\n"], ["a\n", "b\n", "\nc"], ["a", "\nb", ""], "\n\n"),
        (["aab"], ["aa", "aa", "b"], ["", "aa", ""], "aab"),
        (["é😀"], ["xé", "😀y"], ["x", ""], "é😀"),
        (["bc", "abcd"], ["abcd"], ["a"], "bc"),
        (["c", "abc"], ["abc"], [""], "abc"),
        (["abcd", "bx"], ["abc", "bx"], ["", "abc"], "bx"),
    ],
)
def test_cuts(stops: list[str], parts: list[str], shown: list[str], found: str | None) -> None:
    assert run(stops, parts) == (shown, found)


def test_kept_text_ends_with_the_stop() -> None:
    assert run(["stop"], ["a st", "op b"], keep=True) == (["a ", "stop"], "stop")


def test_nothing_of_a_stop_is_shown_before_it_is_ruled_out() -> None:
    shown, _ = run(["END"], list("the EN of the END."))
    assert "".join(shown) == "the EN of the "
    assert "E" not in shown


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4),
    text=st.text("abc", max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=6),
)
def test_any_chunking_gives_the_same(stops: list[str], text: str, cuts: list[int]) -> None:
    borders = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    parts = [text[a:b] for a, b in itertools.pairwise(borders)]
    shown, found = run(stops, parts)
    ends = [at for at in range(len(text) + 1) if text[:at].endswith(tuple(stops))]
    if not ends:
        assert ("".join(shown), found) == (text, None)
    else:
        longest = max((stop for stop in stops if text[: ends[0]].endswith(stop)), key=len)
        assert ("".join(shown), found) == (text[: ends[0] - len(longest)], longest)
