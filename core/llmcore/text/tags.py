"""Find a tag in a text that arrives in pieces: the text that is certainly before it, and the text that must wait."""

from __future__ import annotations


def before_tag(text: str, tag: str) -> tuple[str, str | None]:
    """(text before `tag`, text after it), or (text that cannot belong to the tag, None) if the tag is not complete.

    In the second case the longest end of `text` that begins the tag is in neither part. Keep `text[len(before):]` for
    the next piece.
    """
    before, found, after = text.partition(tag)
    if found:
        return before, after
    return text[: len(text) - held_back(text, tag)], None


def held_back(text: str, tag: str) -> int:
    """The number of characters at the end of `text` that may begin `tag`. `text` does not contain the whole tag."""
    at = text.find(tag[0], max(0, len(text) - len(tag) + 1))
    while at >= 0 and not tag.startswith(text[at:]):
        at = text.find(tag[0], at + 1)
    return len(text) - at if at >= 0 else 0
