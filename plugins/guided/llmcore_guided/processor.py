"""The logits processor `guided`."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from llguidance import LLMatcher
from llmcore.api import ProcessorContext, words_of
from llmcore.api.sched import Int32

from llmcore_guided.compiler import Compiler, failure_of
from llmcore_guided.grammars import grammar_text, wanted
from llmcore_guided.vocabulary import Vocabulary, vocabulary


class Guided:
    """api.MaskProcessor. The end of an answer is allowed where the grammar is complete, and comes by itself where
    nothing else could follow. `hidden`: ids that end no answer of this request, allowed only where nothing else is.
    """

    def __init__(self, matcher: LLMatcher, words: int, size: int, hidden: Int32 | None) -> None:
        self._matcher = matcher
        self._words = np.zeros(words, np.int32)
        self._size = size
        self._hidden = hidden

    def accept(self, token: int) -> None:
        """MaskProcessor."""
        if not self._matcher.consume_token(token) or self._matcher.is_error():
            raise failure_of(self._matcher)

    def finished(self) -> bool:
        """MaskProcessor."""
        return bool(self._matcher.is_stopped())

    def mask(self) -> Int32:
        """MaskProcessor."""
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        if self._matcher.is_error():
            raise failure_of(self._matcher)
        words: Int32 = self._words[: self._size]
        if self._hidden is None:
            return words
        others: Int32 = words & ~self._hidden
        return others if others.any() else words


class _Model:
    """What all requests of a model share, made once."""

    def __init__(self, context: ProcessorContext) -> None:
        self.vocabulary: Vocabulary = vocabulary(context)
        self.compiler = Compiler(self.vocabulary.tokens)


_models: weakref.WeakKeyDictionary[Callable[[], Any], _Model] = weakref.WeakKeyDictionary()
"""By the function that opens the model's tokenizer."""
_opening = threading.Lock()


def _model(context: ProcessorContext) -> _Model:
    with _opening:
        if context.tokenizer not in _models:
            _models[context.tokenizer] = _Model(context)
        return _models[context.tokenizer]


def warm(context: ProcessorContext) -> None:
    """LogitsProcessorSpec.warm."""
    _model(context)


def make(args: Mapping[str, Any], context: ProcessorContext) -> Callable[[Int32], Guided]:
    """LogitsProcessorSpec.make; see `grammars.wanted` for the arguments."""
    want = wanted(args)
    model = _model(context)
    matcher = model.compiler.matcher(grammar_text(want, model.vocabulary.tag))
    hidden = _mask_of(set(model.vocabulary.eos_ids) - set(context.stop_ids), context.vocab_size)
    size, words = words_of(context.vocab_size), words_of(model.vocabulary.tokens.vocab_size)
    return lambda prompt: Guided(matcher.deep_copy(), words, size, hidden)


def _mask_of(ids: set[int], size: int) -> Int32 | None:
    if not ids:
        return None
    bits = np.zeros(words_of(size) * 32, np.bool_)
    bits[list(ids)] = True
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)
