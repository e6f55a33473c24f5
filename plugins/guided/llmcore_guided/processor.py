"""The logits processor `guided`."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from llguidance import LLMatcher
from llmcore.api import ProcessorContext, words_of
from llmcore.api.sched import Int32

from llmcore_guided.compiler import Compiler, failure_of
from llmcore_guided.grammars import regex_of
from llmcore_guided.masks import Masks
from llmcore_guided.residuals import Place
from llmcore_guided.trials import Trials
from llmcore_guided.vocabulary import Vocabulary, vocabulary

OPEN_OBJECTS = "guided_open_objects"
"""The option that leaves schemas' objects as open as the standard has them."""

PAID_BYTES = 512
"""llguidance renews the budget of a step only when it computes a mask. After this many bytes of text a mask is
computed even if the cache has it."""


class Guided:
    """api.MaskProcessor. The answer may end where the grammar is complete. It ends by itself where nothing else can
    follow. `hidden`: ids that do not end an answer of this request. They are allowed only where nothing else is."""

    def __init__(
        self, matcher: LLMatcher, model: _Model, size: int, hidden: frozenset[int], place: Place | None
    ) -> None:
        self._matcher = matcher
        self._model = model
        self._words = np.zeros(words_of(model.vocabulary.tokens.vocab_size), np.int32)
        self._size = size
        self._hidden = hidden
        self._place = place
        self._told: list[bytes] = []
        self._unpaid = 0

    def accept(self, token: int) -> None:
        """See api.MaskProcessor."""
        if self._place is not None:
            self._told.append(self._model.vocabulary.pieces[token])
        if not self._matcher.consume_token(token) or self._matcher.is_error():
            raise failure_of(self._matcher)

    def finished(self) -> bool:
        """See api.MaskProcessor."""
        return bool(self._matcher.is_stopped())

    def mask(self) -> Int32:
        """See api.MaskProcessor."""
        place = self._place
        if place is None or not self._moved(place):
            return self._computed()
        key, masks = (place.key, self._hidden), self._model.masks
        known = masks.get(place.residuals, key)
        if known is not None and self._unpaid < PAID_BYTES:
            return known
        self._unpaid = 0
        computed = self._computed()
        masks.keep(place.residuals, key, computed)
        return computed

    def _moved(self, place: Place) -> bool:
        """True if the answer's place in the expression is known."""
        for piece in self._told:
            place.move(piece)
            self._unpaid += len(piece)
        self._told.clear()
        return place.key is not None

    def _computed(self) -> Int32:
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        if self._matcher.is_error():
            raise failure_of(self._matcher)
        words: Int32 = self._words[: self._size]
        if not self._hidden:
            return words
        others: Int32 = words & ~self._model.mask_of(self._hidden, self._size)
        return others if others.any() else words


class _Model:
    """The objects that all requests of a model share, made once."""

    def __init__(self, context: ProcessorContext) -> None:
        self.vocabulary: Vocabulary = vocabulary(context)
        self.trials = Trials(self.vocabulary.words)
        closed = not context.options.get(OPEN_OBJECTS)
        self.compiler = Compiler(self.vocabulary.tokens, self.trials, self.vocabulary.tag, closed=closed)
        self.masks = Masks(self.vocabulary)
        self.mask_of = lru_cache(maxsize=64)(_mask_of)


_models: weakref.WeakKeyDictionary[Callable[[], Any], _Model] = weakref.WeakKeyDictionary()
"""Models by the function that opens their tokenizer."""
_opening = threading.Lock()


def _model(context: ProcessorContext) -> _Model:
    with _opening:
        if context.tokenizer not in _models:
            _models[context.tokenizer] = _Model(context)
        return _models[context.tokenizer]


def warm(context: ProcessorContext) -> None:
    """LogitsProcessorSpec.warm."""
    _model(context).trials.warm()


def make(args: Mapping[str, Any], context: ProcessorContext) -> Callable[[Int32], Guided]:
    """LogitsProcessorSpec.make; see `grammars.wanted` for the arguments."""
    model = _model(context)
    made = model.compiler.compiled(args)
    context.leave_out(made.unenforced)
    hidden = frozenset(model.vocabulary.eos_ids) - set(context.stop_ids)
    size, regex = words_of(context.vocab_size), regex_of(args)

    def start(prompt: Int32) -> Guided:
        place = None if regex is None else model.masks.place(regex)
        return Guided(made.matcher.deep_copy(), model, size, hidden, place)

    return start


def _mask_of(ids: frozenset[int], words: int) -> Int32:
    bits = np.zeros(words * 32, np.bool_)
    bits[list(ids)] = True
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)
