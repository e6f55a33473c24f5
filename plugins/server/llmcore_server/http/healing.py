"""Token healing: the model writes the end of a prompt again, because a prompt may end in the middle of a usual token.

The last tokens of the prompt are removed, and the answer has to begin with their text. Until it has that text, the
sampler may only draw tokens that are a beginning of the missing text, or that begin with all of it. The part of the
answer that repeats the prompt is not shown.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
from llmcore.api.bridge import LogitsProcessor, Prompt, Submit
from llmcore.api.errors import ConfigError
from llmcore.api.processors import ProcessorContext, words_of
from llmcore.api.protocols import Int32, Tokenizer
from llmcore.text.stream import Healing
from llmcore.text.tokenizer import HasPieces

MOST_TOKENS = 2
"""Most tokens to remove from a prompt's end; the same number as in LightLLM."""

MORE_TOKENS = 6
"""Extra tokens that an answer may have, because the model may write the removed text with more tokens."""

PROCESSOR = "token_healing"
"""The name of the processor, which llmcore_server.plugin contributes."""


def check_healing(tokenizer: Tokenizer) -> None:
    """Raise ConfigError if the text of a token depends on its neighbours."""
    if not isinstance(tokenizer, HasPieces) or tokenizer.pieces(skip_special_tokens=False) is None:
        raise ConfigError(
            "--token_healing_mode needs a tokenizer whose text is its tokens' bytes one after another, which this "
            "model's is not; leave the option out"
        )


def heal(submit: Submit, tokenizer: Tokenizer, max_total_len: int) -> tuple[Submit, Healing | None]:
    """The request without the last tokens of its prompt, and what was removed; None if no token can be removed.

    Special tokens stay. Requests with logits processors, `allowed_ids`, beams, prompt log-probabilities or `score`
    keep their whole prompt.
    """
    sampling = submit.sampling
    settled = sampling.logits_processors or sampling.allowed_ids or submit.beams or submit.prompt_logprobs
    ids = submit.prompt.ids.tolist()
    pieces = [] if settled or submit.score else _ends(ids, tokenizer)
    if not pieces:
        return submit, None
    prefix = b"".join(pieces)
    # The detokenizer drops the leading space of the answer, which begins with this prefix.
    text = prefix.decode().removeprefix(" ") if _drops_space(tokenizer) else prefix.decode()
    size = len(ids) - len(pieces)
    processor = LogitsProcessor(PROCESSOR, {"prefix": prefix.hex()})
    healed = msgspec.structs.replace(
        submit,
        prompt=Prompt.of(ids[:size]),
        max_new_tokens=min(submit.max_new_tokens + len(pieces) + MORE_TOKENS, max_total_len - size),
        sampling=msgspec.structs.replace(sampling, logits_processors=(processor,)),
    )
    return healed, Healing(len(pieces), len(text), submit.max_new_tokens)


def _ends(ids: Sequence[int], tokenizer: Tokenizer) -> list[bytes]:
    """The bytes of the tokens to remove from the end of `ids`: whole characters, and never the whole prompt."""
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
    """The tokens sorted by their bytes, without special tokens."""

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        self.size = size
        self.bytes = [b""] * size
        for token in range(min(size, tokenizer.vocab_size)):
            if token not in tokenizer.special_ids:
                self.bytes[token] = tokenizer.token_bytes(token)
        self._order = sorted((piece, token) for token, piece in enumerate(self.bytes) if piece)

    def continuing(self, rest: bytes) -> list[int]:
        """The tokens that are a beginning of `rest` or begin with `rest`."""
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
        """Remove the text of `token` from the missing text."""
        piece = self._vocabulary.bytes[token]
        self._rest = self._rest[len(piece) :] if self._rest.startswith(piece) else b""

    def finished(self) -> bool:
        """Always False: the processor never ends an answer."""
        return False

    def free(self) -> bool:
        """True if the answer has the whole prefix, so that every token is allowed."""
        return not self._rest

    def mask(self) -> Int32 | None:
        """The mask of the tokens that may come next, or None if all may."""
        if not self._rest:
            return None
        allowed = np.zeros(words_of(self._vocabulary.size) * 32, np.bool_)
        allowed[self._vocabulary.continuing(self._rest)] = True
        return np.packbits(allowed, bitorder="little").view("<i4").astype(np.int32)


def make(args: dict[str, Any], context: ProcessorContext) -> Any:
    """LogitsProcessorSpec.make. Raises ValueError for invalid arguments."""
    prefix = args.pop("prefix", None)
    if args or not isinstance(prefix, str):
        raise ValueError("it takes prefix, hexadecimal text, and nothing else")
    vocabulary = _vocabulary(context.tokenizer, context.vocab_size)
    wanted = bytes.fromhex(prefix)
    return lambda prompt: Healer(vocabulary, wanted)


def warm(context: ProcessorContext) -> None:
    """LogitsProcessorSpec.warm: sort the vocabulary before the first request."""
    _vocabulary(context.tokenizer, context.vocab_size)


@lru_cache(maxsize=2)
def _vocabulary(tokenizer: Callable[[], Tokenizer], size: int) -> Vocabulary:
    return Vocabulary(tokenizer(), size)
