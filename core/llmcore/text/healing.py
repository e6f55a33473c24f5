"""Token healing: the end of a prompt is made anew, so that its last token need not be one that no text would end in.

The last tokens of a prompt are taken away, and the answer has to begin with their text: while it does not stand there,
only tokens may be drawn that are a part of what is left of it, or that begin with all that is left. What repeats the
prompt is not shown.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from llmcore.bridge import LogitsProcessor, Submit
from llmcore.errors import ConfigError
from llmcore.processors import LogitsProcessorSpec, ProcessorContext, words_of
from llmcore.protocols import Int32, Tokenizer
from llmcore.text.detokenizer import HasPieces

MOST_TOKENS = 2
"""Tokens that are taken from a prompt's end, LightLLM's number."""

MORE_TOKENS = 6
"""Tokens that an answer may have beside those asked for and those taken away, because the end may be made of more."""

PROCESSOR = LogitsProcessorSpec(
    name="token_healing",
    make=f"{__name__}:make",
    warm=f"{__name__}:warm",
    example={"prefix": "686f7573"},
    summary="The answer begins with the bytes `prefix` (hexadecimal), cut into tokens as the model likes.",
)
"""What the engine has with `--token_healing_mode`."""


@dataclass(frozen=True)
class Healing:
    """What was taken from a prompt: `tokens` tokens, that is `characters` of text; `most`: tokens asked for."""

    tokens: int
    characters: int
    most: int


def check_healing(tokenizer: Tokenizer) -> None:
    """Raise ConfigError where a token's text depends on what is beside it."""
    if not isinstance(tokenizer, HasPieces) or tokenizer.pieces(skip_special_tokens=False) is None:
        raise ConfigError(
            "--token_healing_mode needs a tokenizer whose text is its tokens' bytes one after another, which this "
            "model's is not; leave the option out"
        )


def heal(submit: Submit, tokenizer: Tokenizer, max_total_len: int) -> tuple[Submit, Healing | None]:
    """The request without its prompt's last tokens, and what was taken; None where nothing can be.

    Special tokens stay, as do all where the answer's first token is settled otherwise or the prompt itself counts.
    """
    sampling = submit.sampling
    settled = sampling.logits_processors or sampling.allowed_ids or submit.beams or submit.prompt_logprobs
    ids = np.frombuffer(submit.prompt, "<i4")
    pieces = [] if settled or submit.score else _ends(ids.tolist(), tokenizer)
    if not pieces:
        return submit, None
    prefix = b"".join(pieces)
    # an answer loses its leading space where this prefix does
    text = prefix.decode().removeprefix(" ") if _drops_space(tokenizer) else prefix.decode()
    size = ids.size - len(pieces)
    processor = LogitsProcessor(PROCESSOR.name, {"prefix": prefix.hex()})
    healed = msgspec.structs.replace(
        submit,
        prompt=submit.prompt[: 4 * size],
        max_new_tokens=min(submit.max_new_tokens + len(pieces) + MORE_TOKENS, max_total_len - size),
        sampling=msgspec.structs.replace(sampling, logits_processors=(processor,)),
    )
    return healed, Healing(len(pieces), len(text), submit.max_new_tokens)


def _ends(ids: Sequence[int], tokenizer: Tokenizer) -> list[bytes]:
    """The bytes of the tokens to take from the end of `ids`: whole characters, and never all of the prompt."""
    count = min(MOST_TOKENS, len(ids) - 1)
    while count:
        last = ids[-count:]
        pieces = [tokenizer.token_bytes(token) for token in last]
        try:
            b"".join(pieces).decode()
        except UnicodeDecodeError:
            count -= 1
            continue
        if all(pieces) and not tokenizer.special_ids.intersection(last):
            return pieces
        count -= 1
    return []


def _drops_space(tokenizer: Tokenizer) -> bool:
    pieces = tokenizer.pieces(skip_special_tokens=False) if isinstance(tokenizer, HasPieces) else None
    return pieces is not None and pieces.drops_leading_space


class Vocabulary:
    """The tokens in order of their bytes; special ones are in no text."""

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        self.size = size
        self.bytes = [b""] * size
        for token in range(min(size, tokenizer.vocab_size)):
            if token not in tokenizer.special_ids:
                self.bytes[token] = tokenizer.token_bytes(token)
        self._order = sorted((piece, token) for token, piece in enumerate(self.bytes) if piece)

    def continuing(self, rest: bytes) -> list[int]:
        """Tokens that are the beginning of `rest` or begin with it."""
        found = []
        for end in range(1, len(rest) + 1):
            at = bisect_left(self._order, (rest[:end], 0))
            while at < len(self._order) and self._order[at][0] == rest[:end]:
                found.append(self._order[at][1])
                at += 1
        while at < len(self._order) and self._order[at][0].startswith(rest):
            found.append(self._order[at][1])
            at += 1
        return found


class Healer:
    """The processor of one choice."""

    def __init__(self, vocabulary: Vocabulary, prefix: bytes) -> None:
        self._vocabulary = vocabulary
        self._rest = prefix

    def accept(self, token: int) -> None:
        """`token` stands for a part of what is left, or for all of it."""
        piece = self._vocabulary.bytes[token]
        self._rest = self._rest[len(piece) :] if self._rest.startswith(piece) else b""

    def finished(self) -> bool:
        """The answer goes on."""
        return False

    def free(self) -> bool:
        """Whether the prefix stands there."""
        return not self._rest

    def mask(self) -> Int32 | None:
        """The tokens that may come next."""
        if not self._rest:
            return None
        allowed = np.zeros(words_of(self._vocabulary.size) * 32, np.bool_)
        allowed[self._vocabulary.continuing(self._rest)] = True
        return np.packbits(allowed, bitorder="little").view("<i4").astype(np.int32)


def make(args: dict[str, Any], context: ProcessorContext) -> Any:
    """LogitsProcessorSpec.make."""
    prefix = args.pop("prefix", None)
    if args or not isinstance(prefix, str):
        raise ValueError("it takes prefix, hexadecimal text, and nothing else")
    vocabulary = _vocabulary(context.tokenizer, context.vocab_size)
    wanted = bytes.fromhex(prefix)
    return lambda prompt: Healer(vocabulary, wanted)


def warm(context: ProcessorContext) -> None:
    """LogitsProcessorSpec.warm."""
    _vocabulary(context.tokenizer, context.vocab_size)


@lru_cache(maxsize=2)
def _vocabulary(tokenizer: Callable[[], Tokenizer], size: int) -> Vocabulary:
    return Vocabulary(tokenizer(), size)
