"""A model's tokenizer as llguidance needs it: the bytes of every id, which of them are special, which end answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from llguidance import LLTokenizer, TokenizerWrapper
from llmcore.api import ProcessorContext, RequestError, Tokenizer

from llmcore_guided.talk import Words

_SPECIAL = b"\xff"
"""What llguidance wants before the name of a token that is no text."""

_WORDS = tuple(f"{kind}{{1,{most}}}" for kind in ("[a-z]", " [a-z]") for most in (4, 10))
_NAMES = ("[A-Za-z]{1,10}", "[A-Za-z0-9_]{1,10}")
"""Kinds of tokens that are allowed or not as a whole where an expression repeats characters (`\\w{1,50}`): its masks
then take a fifth to a half of a walk over the vocabulary. A token belongs to the first kind that it is of."""


@dataclass(frozen=True)
class Vocabulary:
    """`size`: ids that the model knows, tokenizer or not. `eos_ids`: those that end answers.

    `tokens`: what llguidance sees, which is one more where no id ends answers. `pieces`: the bytes of each, of special
    ones something that is no text.
    """

    tokenizer: Tokenizer
    size: int
    eos_ids: tuple[int, ...]
    tokens: LLTokenizer
    pieces: Sequence[bytes]

    def most(self, tables: Sequence[bytes]) -> int:
        """The most times that one token has bytes of every table, which say of each byte whether they count it; of no
        table: any bytes."""
        joined, lengths, frequent = self._text
        least = lengths
        for table in sorted(tables, key=lambda table: int(frequent @ np.frombuffer(table, np.uint8))):
            marks = np.frombuffer(joined.tobytes().translate(table), np.uint8)
            sums, ends = np.concatenate(([0], np.cumsum(marks, dtype=np.int32))), np.cumsum(lengths)
            found = sums[ends] - sums[ends - lengths]
            some = found > 0
            if not some.any():
                return 0
            joined, lengths, least = joined[np.repeat(some, lengths)], lengths[some], np.minimum(least, found)[some]
        return int(least.max())

    @cached_property
    def _text(self) -> tuple[Any, Any, Any]:
        """The bytes of all tokens that are text, how many each has, and how many there are of each."""
        pieces = [piece for piece in self.pieces if piece and not piece.startswith(_SPECIAL)]
        lengths = np.fromiter(map(len, pieces), np.int64, len(pieces))
        joined = np.frombuffer(b"".join(pieces), np.uint8)
        return joined, lengths, np.bincount(joined, minlength=256)

    @property
    def words(self) -> Words:
        """The part of it that grammars may name."""
        special = {
            token: piece[1:].decode("utf-8", "replace")
            for token, piece in enumerate(self.pieces)
            if piece.startswith(_SPECIAL)
        }
        return Words(len(self.pieces), self.eos_ids or (self.size,), special)

    def tag(self, text: str) -> str | None:
        """The special token that `text` is, as Lark writes it; None where it is ordinary text."""
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return f"<[{ids[0]}]>" if len(ids) == 1 and ids[0] in self.tokenizer.special_ids else None


def vocabulary(context: ProcessorContext) -> Vocabulary:
    """That of the model. Raises ValueError where its text is not its tokens' bytes one after another."""
    tokenizer, size = context.tokenizer(), context.vocab_size
    pieces = getattr(tokenizer, "pieces", None)
    if pieces is not None and pieces(skip_special_tokens=False) is None:
        raise ValueError("the tokens of this model's tokenizer are no pieces of text, which guided decoding needs")
    eos = tuple(token for token in context.eos_ids or tokenizer.eos_ids if token < size)
    special = {*(token for token in tokenizer.special_ids if token < size), *eos}
    tokens = [_bytes(tokenizer, token, token in special) for token in range(size)]
    if not eos:
        tokens.append(_SPECIAL + b"<end>")
    wrapper = TokenizerWrapper(_Tokens(tokens, eos or (size,), sorted(special), tokenizer))
    slices = [*_WORDS, *_NAMES, *LLTokenizer.general_slices()]
    tree = LLTokenizer(wrapper, eos_token=list(eos or (size,)), slices=slices)
    return Vocabulary(tokenizer, size, eos, tree, tokens)


def _bytes(tokenizer: Tokenizer, token: int, special: bool) -> bytes:
    """What `token` stands for; an id beyond the tokenizer's vocabulary stands for nothing and is never allowed."""
    if token >= tokenizer.vocab_size:
        return b""
    try:
        return _SPECIAL + tokenizer.token(token).encode() if special else tokenizer.token_bytes(token)
    except (RequestError, ValueError, IndexError):
        return b""


class _Tokens:
    """What llguidance's TokenizerWrapper wraps."""

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], eos: Sequence[int], special: Sequence[int], tokenizer: Tokenizer):
        self.tokens = tokens
        self.eos_token_id = eos[0]
        self.special_token_ids = special
        self._tokenizer = tokenizer

    def __call__(self, text: Any) -> list[int]:
        text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(text, add_special_tokens=False)
