"""Detokenizers: ids to text, one id at a time, and never half a character.

The joined results of a detokenizer are the text of the whole sequence.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from llmcore.api.protocols import Tokenizer
from llmcore.text.tokenizer import Pieces

_REPLACEMENT = "\ufffd"
_WINDOW = 8
"""Most ids held for an unfinished character. A character has at most four bytes, so older ids are invalid bytes."""
_TAIL = 4


class Detokenizer(Protocol):
    """The detokenizer of one sequence."""

    def add(self, token_id: int) -> str:
        """The text that `token_id` completes, or "" while a character is unfinished."""

    def flush(self) -> str:
        """The held text at the end of the sequence: U+FFFD for an unfinished character, or ""."""


@runtime_checkable
class HasPieces(Protocol):
    """A tokenizer that knows the bytes of its ids."""

    def pieces(self, *, skip_special_tokens: bool) -> Pieces | None:
        """Bytes by id, or None if a text is not the concatenation of its tokens' bytes."""


def detokenizer(
    tokenizer: Tokenizer, *, skip_special_tokens: bool = True, keep: frozenset[int] = frozenset()
) -> Detokenizer:
    """A new detokenizer for one sequence. `keep`: special tokens to show although the others are skipped."""
    if isinstance(tokenizer, HasPieces):
        pieces = tokenizer.pieces(skip_special_tokens=skip_special_tokens)
        every = tokenizer.pieces(skip_special_tokens=False) if keep and skip_special_tokens else None
        kept = None if every is None else {token_id: every[token_id] for token_id in keep}
        if pieces is not None:
            return BytesDetokenizer(pieces, kept)
    return WindowDetokenizer(tokenizer, skip_special_tokens, keep)


class BytesDetokenizer:
    """Decodes the bytes of ids as UTF-8 step by step, with one look-up and one call per id.

    `kept`: id -> bytes, which replace those in `pieces`.
    """

    __slots__ = ("_held", "_kept", "_pieces", "_strip")

    def __init__(self, pieces: Pieces, kept: Mapping[int, bytes] | None = None):
        self._pieces = pieces
        self._kept = kept
        self._held = b""
        self._strip = pieces.drops_leading_space

    def add(self, token_id: int) -> str:
        """The text that `token_id` completes."""
        kept = self._kept
        data = self._pieces[token_id] if kept is None or token_id not in kept else kept[token_id]
        if self._held:
            data = self._held + data
        text, used = utf_8_decode(data, "replace", False)
        self._held = data[used:]
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text

    def flush(self) -> str:
        """U+FFFD for an unfinished character, or ""."""
        held, self._held = self._held, b""
        return held.decode("utf-8", "replace")


class WindowDetokenizer:
    """Works with any tokenizer: decodes a short window of the last ids again and emits the new text.

    The window starts one emission earlier, because many decoders treat the first token of a text differently.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, keep: frozenset[int] = frozenset()):
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids - keep if skip_special_tokens else frozenset[int]()
        # With `keep`, `add` skips the other special tokens itself, and `decode` must show the kept ones.
        self._skip = skip_special_tokens and not keep
        self._ids: list[int] = []
        self._read = 0
        self._known = ""
        """Text of `_ids[:_read]`, which was emitted already."""

    def add(self, token_id: int) -> str:
        """The text that `token_id` completes."""
        if token_id in self._skipped:
            return ""
        self._ids.append(token_id)
        text = self._text(len(self._ids))
        if text.endswith(_REPLACEMENT):
            if len(self._ids) - self._read <= _WINDOW:
                return ""
            return self._emit(len(self._ids) - _TAIL)
        return self._emit(len(self._ids))

    def flush(self) -> str:
        """The text that is still held."""
        return self._emit(len(self._ids))

    def _emit(self, upto: int) -> str:
        new = self._text(upto)[len(self._known) :]
        if new:
            self._ids = self._ids[self._read :]
            self._read = upto - self._read
            self._known = self._text(self._read)
        return new

    def _text(self, upto: int) -> str:
        return self._tokenizer.decode(self._ids[:upto], skip_special_tokens=self._skip)
