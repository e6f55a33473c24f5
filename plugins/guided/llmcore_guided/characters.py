"""Sets of characters as regular expressions write them."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass

_SPACE = "\t\n\x0b\x0c\r "
_WORD_CATEGORIES = frozenset(("Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Mc", "Me", "Nd", "Pc"))
_OTHER_CATEGORIES = frozenset(("Zs", "Zl", "Zp", "Cc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "Sc", "Sm"))
"""Of the rest (circled letters, what is not assigned yet) two versions of Unicode may think differently."""


@dataclass(frozen=True)
class Characters:
    """Those of `ranges` (first, last) and of `classes`: "w", "s", "d", or in capitals all others. `negated`: all but
    those. They are Unicode's, as llguidance reads them."""

    ranges: tuple[tuple[str, str], ...]
    classes: frozenset[str] = frozenset()
    negated: bool = False

    def has(self, character: str) -> bool | None:
        """None: it depends on the version of Unicode."""
        found: bool | None = any(first <= character <= last for first, last in self.ranges)
        for name in () if found else self.classes:
            one = _of_class(name.lower(), character)
            if one is None:
                found = None
            elif one == name.islower():
                found = True
                break
        return None if found is None else found != self.negated

    def may_have_byte(self, byte: int) -> bool:
        """Whether the byte may be part of one of them."""
        if byte < 0x80:
            return bool(self.has(chr(byte)))
        return self.negated or bool(self.classes) or any(last >= "\x80" for _, last in self.ranges)


def _of_class(name: str, character: str) -> bool | None:
    if character < "\x80" and name == "s":
        return character in _SPACE
    if character < "\x80":
        return "0" <= character <= "9" or (name == "w" and (character.isalnum() or character == "_"))
    category = unicodedata.category(character)
    if name == "s":
        return character.isspace()
    if name == "d":
        return None if category == "Cn" else category == "Nd"
    return True if category in _WORD_CATEGORIES else False if category in _OTHER_CATEGORIES else None
