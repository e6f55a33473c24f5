"""llguidance's errors and warnings in the client's terms. The translated grammar is never shown."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from llmcore_guided.limits import LIMITS

MOST_CHARACTERS = 300

_NOTHING = ("NoExtension", "NoExtensionBias")
_TOO_MANY = re.compile(r"items; max is|too many items", re.IGNORECASE)
_LIMIT = re.compile(r"max is|limit|fuel|too (many|big|large|complex)|unable to determine", re.IGNORECASE)
"""llguidance's words for an exceeded limit. It has no error codes."""

_EXPRESSION = re.compile(r"regex parse error:\n(?P<shown>.*?)error: (?P<why>[^\n]+)", re.DOTALL)
_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
_UNKNOWN_KEYS = re.compile(r"Unimplemented keys: (\[.*\])")
_KEYWORDS = {"Unknown format": "format", "oneOf not fully supported": "oneOf"}
"""The beginning of a warning -> the keyword that is not enforced."""


def said(error: str, *, places: bool = False) -> str:
    """Returns the mistake in one line. `places`: lines and columns are those of the client's own text."""
    text = error.replace("<non-verbose/>", "").strip()
    if text in _NOTHING:
        return "nothing fits it"
    if _TOO_MANY.search(text):
        return (
            f"more than {LIMITS.max_items_in_row:,} ways to go on are possible at one point; have fewer alternatives "
            "there, or join them in one regular expression, enum of texts or terminal (a rule in capitals)"
        )
    place = _PLACE.match(text)
    where = f"line {place[1]}, column {place[2]}: " if place and places else ""
    expression = _EXPRESSION.search(text)
    if expression is not None:
        return f"{where}the expression {_shown(expression['shown'])}has an error: {expression['why']}"[
            :MOST_CHARACTERS
        ]
    if is_limit(text):
        return "it is too complex to compile; make it smaller, or split it"
    first = text[place.end() if place else 0 :].split("\n", 1)[0].split(" (at ", 1)[0].strip()
    return (where + first)[:MOST_CHARACTERS] or "it cannot be compiled"


def is_limit(error: str) -> bool:
    """True for an exceeded limit, which the client can stay below. Every other error is a mistake."""
    return _LIMIT.search(error) is not None


def unenforced(warnings: Iterable[str]) -> list[str]:
    """Returns the keywords that a schema has and its grammar does not enforce, in alphabetical order."""
    found: set[str] = set()
    for warning in warnings:
        keys = _UNKNOWN_KEYS.search(warning)
        found.update(json.loads(keys[1]) if keys else ())
        found.update(keyword for begin, keyword in _KEYWORDS.items() if warning.startswith(begin))
    return sorted(found)


def _shown(lines: str) -> str:
    """Returns the expression that an error shows, if it is short."""
    first = lines.split("\n", 1)[0].strip()
    return f"{first!r} " if first and len(first) < 100 else ""
