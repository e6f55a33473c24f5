"""Text to ids, and ids to text. Tokenizers use the `tokenizers` package, without transformers or torch.

In most tokenizers a text is the concatenation of its tokens' bytes (PieceRule). Two families of decoders work like
that. Byte-level ones write vocabulary strings in an alphabet of 256 printable characters, one per byte.
SentencePiece-like ones have "▁" for a space and `<0x0A>` for a single byte, and drop one leading space from the whole
text.

A detokenizer takes one id at a time and never returns half a character. The joined results of a detokenizer are the
text of the whole sequence.
"""

from __future__ import annotations

import re
from codecs import utf_8_decode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import orjson
from tokenizers import Tokenizer as Backend

from llmcore.api.errors import ConfigError, RequestError, reraise_if_stopping
from llmcore.api.protocols import Tokenizer
from llmcore.text.companions import Companions, read_companions
from llmcore.text.templates import ChatTemplate, Renderer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_ALPHABET = {chr(byte): byte for byte in _PRINTABLE} | {chr(0x100 + i): byte for i, byte in enumerate(_OTHERS)}
"""Character -> byte of byte-level tokenizers. Printable Latin-1 stays; other bytes follow from U+0100 on."""


@dataclass(frozen=True)
class PieceRule:
    """A function from a vocabulary string to bytes, and a flag: True if the whole text loses one leading space."""

    to_bytes: Callable[[str], bytes]
    drops_leading_space: bool = False


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


_PIECES_AS_TEXT = [
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
"""The decoders of SentencePiece-like tokenizers."""

_WITHOUT_A_SPACE = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
"""The decoder that follows them if the whole text loses its leading space."""


def piece_rule(decoder: Mapping[str, Any] | None) -> PieceRule | None:
    """The rule for a tokenizer.json's `decoder`, or None if text is not the concatenation of its tokens' bytes."""
    steps = [] if decoder is None else decoder.get("decoders", [decoder])
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return PieceRule(byte_level)
    if steps == _PIECES_AS_TEXT:
        return PieceRule(sentencepiece)
    if steps == [*_PIECES_AS_TEXT, _WITHOUT_A_SPACE]:
        return PieceRule(sentencepiece, drops_leading_space=True)
    return None


class Pieces(dict[int, bytes]):
    """Bytes by token id, computed on first use. An id that is not in the vocabulary has no bytes."""

    def __init__(self, backend: Backend, rule: PieceRule, skip: frozenset[int]):
        super().__init__((token_id, b"") for token_id in skip)
        self.drops_leading_space = rule.drops_leading_space
        self._backend = backend
        self._rule = rule

    def __missing__(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        piece = self[token_id] = b"" if token is None else self._rule.to_bytes(token)
        return piece


class FastTokenizer:
    """A `protocols.Tokenizer` for a tokenizer.json and its companions. `vocab_size` includes added tokens."""

    def __init__(self, data: bytes, companions: Companions):
        try:
            self._backend = Backend.from_buffer(data)
        except BaseException as error:
            reraise_if_stopping(error)
            raise ConfigError(f"tokenizer.json cannot be loaded ({error}); download the model again") from error
        # The file's truncation and padding are for training. A server must never truncate silently.
        self._backend.no_truncation()
        self._backend.no_padding()
        description: dict[str, Any] = orjson.loads(data)
        added = description.get("added_tokens") or []
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(vocabulary.values(), default=-1)
        self.special_ids = frozenset(int(token["id"]) for token in added if token.get("special"))
        self.eos_ids = companions.eos_ids or self._ids_of(companions.tokens.get("eos_token"))
        self.template: Renderer = ChatTemplate(companions.templates, companions.tokens)
        self._rule = piece_rule(description.get("decoder"))
        self._pieces: dict[bool, Pieces] = {}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`. `add_special_tokens` adds the model's own special tokens, such as a BOS."""
        try:
            # `encode` holds the GIL: some megabytes take a second, during which all streams would stop.
            found = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except TypeError as error:
            raise RequestError(f"text cannot be tokenized: {error}") from error
        ids: list[int] = found[0].ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`."""
        self._check(ids)
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token(self, token_id: int) -> str:
        """The vocabulary's string for an id; "" for an id in a gap of the vocabulary."""
        self._check((token_id,))
        return self._backend.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one id; for a tokenizer that is not made of bytes, the bytes of its text."""
        self._check((token_id,))
        pieces = self.pieces(skip_special_tokens=False)
        if pieces is None:
            text: str = self._backend.decode([token_id], skip_special_tokens=False)
            return text.encode()
        return pieces[token_id]

    def pieces(self, *, skip_special_tokens: bool) -> Pieces | None:
        """Bytes by id, or None if a text is not the concatenation of its tokens' bytes."""
        if self._rule is None:
            return None
        if skip_special_tokens not in self._pieces:
            skip = self.special_ids if skip_special_tokens else frozenset[int]()
            self._pieces[skip_special_tokens] = Pieces(self._backend, self._rule, skip)
        return self._pieces[skip_special_tokens]

    def chat(self, messages: Sequence[Mapping[str, Any]], /, **variables: Any) -> str:
        """The prompt that the chat template renders. Raises RequestError with the template's own message."""
        return self.template.render(messages, **variables)

    def _ids_of(self, token: str | None) -> tuple[int, ...]:
        found = None if token is None else self._backend.token_to_id(token)
        return () if found is None else (found,)

    def _check(self, ids: Sequence[int]) -> None:
        for token_id in (min(ids, default=0), max(ids, default=0)):
            if not 0 <= token_id < self.vocab_size:
                raise RequestError(f"token id {token_id} is not in the vocabulary; ids are 0 to {self.vocab_size - 1}")


def load_tokenizer(directory: Path) -> FastTokenizer:
    """The tokenizer.json in `directory` with its companions. Raises ConfigError."""
    if not has_tokenizer_json(directory):
        raise ConfigError(f"there is no tokenizer.json in {directory}; pass the model's directory as --model_dir")
    return FastTokenizer((directory / "tokenizer.json").read_bytes(), read_companions(directory))


def has_tokenizer_json(model: Path) -> bool:
    """TokenizerSpec.sniff: True if the directory has a tokenizer.json."""
    return (model / "tokenizer.json").is_file()


# --- ids to text, one by one

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
        return self._tokenizer.decode(self._ids[:upto], skip_special_tokens=False)
