"""Words that an answer must not contain: token sequences that it never completes.

A word of one token becomes a constant logit bias. The last token of a longer word is forbidden while the answer ends
with the word's other tokens. The host checks that before each token, only for requests with such words.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from llmcore.api.bridge import LogitsProcessor, SamplingParams
from llmcore.api.errors import RequestError
from llmcore.api.processors import LogitsProcessorSpec, ProcessorContext
from llmcore.api.protocols import Tokenizer

FIELD = "bad_words"
"""The client's field, and the name of the processor."""

NEVER = -1e30
"""Added to the score of a forbidden token. The score is then below all others, but not minus infinity: if a grammar's
mask allows no other token, the mask wins."""

MOST_TOKENS = 1 << 14
"""Most tokens of a request's words, in all."""

PROCESSOR = LogitsProcessorSpec(
    name=FIELD,
    make=f"{__name__}:make",
    kind="bias",
    example={"sequences": [[1, 2]]},
    summary="The answer never completes one of `sequences`, lists of token ids.",
)
"""The processor, which every engine has."""


def forbid(sampling: SamplingParams, words: Sequence[str], tokenizer: Tokenizer, vocab_size: int) -> SamplingParams:
    """`sampling`, extended so that an answer completes none of `words`.

    Raises RequestError for a word that is empty or that the model cannot write, and if the words leave none of
    `allowed_ids`.
    """
    sequences = sequences_of(words, tokenizer, vocab_size)
    singles = {ids[0] for ids in sequences if len(ids) == 1}
    if sampling.allowed_ids and singles.issuperset(sampling.allowed_ids):
        raise _refusal("they are all the tokens that are allowed")
    bias = sampling.logit_bias | {token: sampling.logit_bias.get(token, 0.0) + NEVER for token in singles}
    longer = [list(ids) for ids in sequences if len(ids) > 1]
    processors = (LogitsProcessor(FIELD, {"sequences": longer}, FIELD),) if longer else ()
    return msgspec.structs.replace(
        sampling, logit_bias=bias, logits_processors=(*sampling.logits_processors, *processors)
    )


def sequences_of(words: Sequence[str], tokenizer: Tokenizer, vocab_size: int) -> list[tuple[int, ...]]:
    """The tokens of each word, at the beginning of a text and after a space.

    A sequence that ends with another one is left out, because the shorter one is never completed.
    """
    found: dict[tuple[int, ...], None] = {}
    tokens = 0
    for word in words:
        bare = word.lstrip() or word  # A word may consist of white space.
        spellings = [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (bare, f" {bare}")]
        if not word or not spellings[0]:
            raise _refusal("a word is empty")
        if highest := max((token for ids in spellings for token in ids if token >= vocab_size), default=0):
            raise _refusal(f"token id {highest} is not in the vocabulary; ids are 0 to {vocab_size - 1}")
        found |= dict.fromkeys(spellings)
        if (tokens := tokens + sum(map(len, spellings))) > MOST_TOKENS:
            raise _refusal(f"they have more than {MOST_TOKENS:,} tokens; send fewer")
    return [ids for ids in found if not any(ids[start:] in found for start in range(1, len(ids)))]


class BadWords:
    """The processor of one choice. Each of `sequences` has at least two tokens."""

    def __init__(self, sequences: Iterable[tuple[int, ...]]) -> None:
        self._last: dict[tuple[int, ...], list[int]] = {}
        for *begun, last in sequences:
            self._last.setdefault(tuple(begun), []).append(last)
        self._lengths = sorted({len(begun) for begun in self._last})
        self._end: deque[int] = deque(maxlen=self._lengths[-1] if self._lengths else 0)

    def accept(self, token: int) -> None:
        """Note that `token` was appended to the answer."""
        self._end.append(token)

    def finished(self) -> bool:
        """Always False: the processor never ends an answer."""
        return False

    def bias(self) -> dict[int, float]:
        """Token -> NEVER, for each token that would complete a sequence."""
        end = tuple(self._end)
        begun = (end[-length:] for length in self._lengths if length <= len(end))
        return {token: NEVER for sequence in begun for token in self._last.get(sequence, ())}


def make(args: dict[str, Any], context: ProcessorContext) -> Any:
    """LogitsProcessorSpec.make. Raises ValueError for invalid arguments."""
    sequences = args.pop("sequences", None)
    if args or not isinstance(sequences, list) or not all(isinstance(ids, list) and len(ids) > 1 for ids in sequences):
        raise ValueError("it takes sequences, lists of two token ids or more, and nothing else")
    if sum(map(len, sequences)) > MOST_TOKENS:
        raise ValueError(f"it takes at most {MOST_TOKENS:,} tokens")
    if not all(type(token) is int and 0 <= token < context.vocab_size for ids in sequences for token in ids):
        raise ValueError(f"token ids are 0 to {context.vocab_size - 1}")
    known = [tuple(ids) for ids in sequences]
    return lambda prompt: BadWords(known)


def _refusal(why: str) -> RequestError:
    return RequestError(f"{FIELD}: {why}", param=FIELD, code="invalid_value")
