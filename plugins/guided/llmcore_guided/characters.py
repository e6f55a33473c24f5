"""Sets of characters as regular expressions write them."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass

_SPACE = "\t\n\x0b\x0c\r "
_WORD_CATEGORIES = frozenset(("Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Mc", "Me", "Nd", "Pc"))
_OTHER_CATEGORIES = frozenset(("Zs", "Zl", "Zp", "Cc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "Sc", "Sm"))
"""Categories that no class has. Two versions of Unicode may disagree about all others (circled letters,
unassigned)."""


@dataclass(frozen=True)
class Characters:
    """The characters of `ranges` (first, last) and of `classes`: "w", "s" and "d", or in capitals their complements.
    `negated` inverts the set. The classes are Unicode's, as llguidance reads them."""

    ranges: tuple[tuple[str, str], ...]
    classes: frozenset[str] = frozenset()
    negated: bool = False

    def has(self, character: str) -> bool | None:
        """True if the set has `character`. None if that depends on the version of Unicode."""
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
        """True if the UTF-8 form of some character of the set may contain `byte`."""
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
