"""Parses the part of regular expressions that this code reads exactly as llguidance does. It refuses the rest."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from llmcore_guided.characters import Characters

MOST_CHARACTERS, DEEPEST = 2_000, 30
_COUNTS = re.compile(r"\{([0-9]{1,6})(?:(,)([0-9]{1,6})?)?\}")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v"}
_PUNCTUATION = frozenset("\\.+*?()|[]{}^$#&-~/!\"%',:;=@_`")
_SPECIAL = frozenset("\\.+*?()|[]{}^$")
_LINE = Characters((("\n", "\n"),), negated=True)


@dataclass(frozen=True)
class Kind:
    """One character of the kind with this number."""

    number: int


@dataclass(frozen=True)
class Series:
    """The parts one after another."""

    parts: tuple[Expression, ...]


@dataclass(frozen=True)
class Branch:
    """Any one of the parts."""

    parts: tuple[Expression, ...]


@dataclass(frozen=True)
class Repeat:
    """`least` to `most` repetitions. `most` None: without a limit."""

    body: Expression
    least: int
    most: int | None


Expression = Kind | Series | Branch | Repeat


def expression(text: str) -> tuple[Expression, list[Characters]]:
    """The parsed expression and its kinds of characters. Raises ValueError for syntax that is not read here."""
    if len(text) > MOST_CHARACTERS:
        raise ValueError("it is too long")
    reader = _Reader(text)
    found = reader.branch()
    if reader.at != len(text):
        raise ValueError(f"unexpected {text[reader.at]!r}")
    return found, list(reader.kinds)


class _Reader:
    def __init__(self, text: str) -> None:
        self.at = 0
        self.kinds: dict[Characters, int] = {}
        self._text = text
        self._depth = 0

    def branch(self) -> Expression:
        self._depth += 1
        if self._depth > DEEPEST:
            raise ValueError("it is too deeply nested")
        parts = [self._series()]
        while self._take("|"):
            parts.append(self._series())
        self._depth -= 1
        return parts[0] if len(parts) == 1 else Branch(tuple(parts))

    def _series(self) -> Expression:
        parts = []
        while self.at < len(self._text) and self._text[self.at] not in "|)":
            parts.append(self._repeated(self._one()))
        return Series(tuple(parts))

    def _repeated(self, body: Expression) -> Expression:
        counts: tuple[int, int | None] | None = None
        for sign, meant in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if counts is None and self._take(sign):
                counts = meant
        found = _COUNTS.match(self._text, self.at) if counts is None else None
        if found is not None:
            least, comma, most = found.groups()
            self.at = found.end()
            counts = int(least), int(most) if most else None if comma else int(least)
        if counts is None:
            return body
        if self._text[self.at : self.at + 1] in tuple("*+?{"):
            raise ValueError("repeats of repeats, and those that prefer few, are not read")
        if counts[1] is not None and counts[0] > counts[1]:
            raise ValueError("it repeats at least more than at most")
        return Repeat(body, *counts)

    def _one(self) -> Expression:
        if self._take("("):
            if self._take("?") and not self._take(":"):
                raise ValueError("only plain groups are read")
            body = self.branch()
            if not self._take(")"):
                raise ValueError("a group has no end")
            return body
        if self._take("["):
            return self._kind(self._class())
        if self._take("."):
            return self._kind(_LINE)
        return self._kind(_of(self._character()))

    def _class(self) -> Characters:
        negated = self._take("^")
        ranges: list[tuple[str, str]] = []
        classes: set[str] = set()
        first = True
        while first or not self._take("]"):
            if self._next() in ("[", "]", "") or self._text[self.at : self.at + 2] in ("&&", "--", "~~"):
                raise ValueError("this class of characters is not read")
            one = self._character(within=True)
            if isinstance(one, Characters):
                classes |= one.classes
            elif self._next() == "-" and self._text[self.at + 1 : self.at + 2] != "]":
                self.at += 1
                last = "" if self._next() in ("[", "]", "-") else self._character(within=True)
                if not isinstance(last, str) or last < one:
                    raise ValueError("this range of characters is not read")
                ranges.append((one, last))
            else:
                ranges.append((one, one))
            if isinstance(one, Characters) and self._next() == "-" and self._text[self.at + 1 : self.at + 2] != "]":
                raise ValueError("a range begins with a class of characters")
            first = False
        return Characters(tuple(sorted(set(ranges))), frozenset(classes), negated)

    def _character(self, within: bool = False) -> Any:
        """Reads one character, or the set that `\\w` or a similar escape stands for."""
        one = self._next()
        self.at += 1
        if one == "\\":
            escaped = self._next()
            self.at += 1
            if escaped and escaped in "wWsSdD":
                return Characters((), frozenset(escaped))
            if escaped not in _ESCAPES and escaped not in _PUNCTUATION:
                raise ValueError("this escape is not read")
            return _ESCAPES.get(escaped, escaped)
        if not one or (not within and one in _SPECIAL):
            raise ValueError(f"{one!r} is not read here")
        return one

    def _kind(self, characters: Characters) -> Kind:
        return Kind(self.kinds.setdefault(characters, len(self.kinds)))

    def _next(self) -> str:
        return self._text[self.at : self.at + 1]

    def _take(self, sign: str) -> bool:
        if self._next() != sign:
            return False
        self.at += 1
        return True


def _of(one: str | Characters) -> Characters:
    return Characters(((one, one),)) if isinstance(one, str) else one
