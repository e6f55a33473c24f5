"""The bytes of each token id, for tokenizers whose text is the concatenation of its tokens' bytes.

Two families of decoders work like that. Byte-level ones write vocabulary strings in an alphabet of 256 printable
characters, one per byte. SentencePiece-like ones have "▁" for a space and `<0x0A>` for a single byte, and drop one
leading space from the whole text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))


@dataclass(frozen=True)
class PieceRule:
    """A function from a vocabulary string to bytes, and a flag: True if the whole text loses one leading space."""

    to_bytes: Callable[[str], bytes]
    drops_leading_space: bool = False


def _alphabet() -> dict[str, int]:
    """Character -> byte of byte-level tokenizers. Printable Latin-1 stays; other bytes follow from U+0100 on."""
    others = (byte for byte in range(256) if byte not in _PRINTABLE)
    return {chr(byte): byte for byte in _PRINTABLE} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _alphabet()


def byte_level(token: str) -> bytes:
    """The bytes of a byte-level vocabulary string. A string outside the alphabet is an added token's plain text."""
    try:
        return bytes([_ALPHABET[char] for char in token])
    except KeyError:
        return token.encode("utf-8", "replace")


def sentencepiece(token: str) -> bytes:
    """The bytes of a SentencePiece vocabulary string."""
    single = _BYTE_TOKEN.fullmatch(token)
    if single:
        return bytes([int(single[1], 16)])
    return token.replace("▁", " ").encode("utf-8", "replace")


def piece_rule(decoder: Mapping[str, Any] | None) -> PieceRule | None:
    """The rule for a tokenizer.json's `decoder`, or None if text is not the concatenation of its tokens' bytes."""
    if decoder is None:
        return None
    if decoder["type"] == "ByteLevel":
        return PieceRule(byte_level)
    if decoder["type"] == "Sequence":
        return _sequence_rule(decoder["decoders"])
    return None


def _sequence_rule(steps: list[Mapping[str, Any]]) -> PieceRule | None:
    """The rule for decoders such as Llama's and Gemma's: Replace "▁" by " ", ByteFallback, Fuse, optionally Strip."""
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return PieceRule(byte_level)
    if kinds[:3] != ["Replace", "ByteFallback", "Fuse"] or kinds[3:] not in ([], ["Strip"]):
        return None
    if steps[0]["pattern"] != {"String": "▁"} or steps[0]["content"] != " ":
        return None
    if kinds[3:] and (steps[3]["content"], steps[3]["start"], steps[3]["stop"]) != (" ", 1, 0):
        return None
    return PieceRule(sentencepiece, bool(kinds[3:]))
