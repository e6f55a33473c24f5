"""A tag in a text that comes in pieces: what is surely before it, and what has to wait."""

from __future__ import annotations


def before_tag(text: str, tag: str) -> tuple[str, str | None]:
    """(what of `text` is before `tag`, what is after it), or (what cannot belong to a tag, None) where there is none.

    Of a text without the tag, the longest end that begins one is neither: keep `text[len(before):]` for the next
    piece.
    """
    before, found, after = text.partition(tag)
    if found:
        return before, after
    return text[: len(text) - held_back(text, tag)], None


def held_back(text: str, tag: str) -> int:
    """How many characters at the end of `text`, which does not hold `tag`, may be its beginning."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
