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
    at = text.find(tag[0], max(0, len(text) - len(tag) + 1))
    while at >= 0 and not tag.startswith(text[at:]):
        at = text.find(tag[0], at + 1)
    return len(text) - at if at >= 0 else 0
