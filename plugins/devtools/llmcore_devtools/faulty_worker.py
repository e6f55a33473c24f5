"""The parts of the plugin `faults` that run in an HTTP worker. No torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmcore.api.text import Event, ParserContext, TextDelta
from llmcore.text.companions import read_companions
from llmcore.text.tokenizer import FastTokenizer, PieceRule, Pieces, has_tokenizer_json

from llmcore_devtools.faults import Panic, fault

__all__ = ["always", "has_tokenizer_json", "load_tokenizer", "make_parser"]


class FaultyTokenizer(FastTokenizer):
    """A tokenizer that raises on the texts of its faults."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`."""
        if fault("tokenize") in text:
            raise Panic("the tokenizer was told to fail")
        return super().encode(text, add_special_tokens=add_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The raw bytes of one id. It does not raise, because code that knows nothing of faults asks for every id."""
        if self.token(token_id) == fault("detokenize"):
            return fault("detokenize").encode()
        return super().token_bytes(token_id)

    def pieces(self, *, skip_special_tokens: bool) -> Pieces | None:
        """Bytes by id."""
        found = super().pieces(skip_special_tokens=skip_special_tokens)
        if isinstance(found, FaultyPieces) or found is None or self._rule is None:
            return found
        faulty = FaultyPieces(self._backend, self._rule, frozenset(found))
        self._pieces[skip_special_tokens] = faulty
        return faulty


class FaultyPieces(Pieces):
    """Pieces that raise for the id of their fault."""

    _backend: Any
    _rule: PieceRule

    def __missing__(self, token_id: int) -> bytes:
        if self._backend.id_to_token(token_id) == fault("detokenize"):
            raise Panic("the detokenizer was told to fail")
        return super().__missing__(token_id)


class FaultyParser:
    """An api.text.OutputParser that returns everything as text."""

    def feed(self, text: str) -> Iterator[Event]:
        """OutputParser."""
        if fault("parser") in text:
            sys.exit("the parser was told to fail")
        yield TextDelta(text)

    def finish(self) -> Iterator[Event]:
        """OutputParser."""
        yield from ()


def load_tokenizer(directory: Path) -> FaultyTokenizer:
    """TokenizerSpec.load."""
    return FaultyTokenizer((Path(directory) / "tokenizer.json").read_bytes(), read_companions(Path(directory)))


def make_parser(context: ParserContext) -> FaultyParser:
    """OutputParserSpec.make."""
    return FaultyParser()


def always() -> str | None:
    """DeviceSpec.available."""
    return None
