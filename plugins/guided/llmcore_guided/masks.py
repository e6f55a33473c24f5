"""A cache of masks. Answers to one regular expression share the masks of the places that they have in common."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Hashable

from llmcore.api.sched import Int32

from llmcore_guided.residuals import Place, Residuals
from llmcore_guided.vocabulary import Vocabulary

KEPT_BYTES, KEY_BYTES = 64 << 20, 1 << 10
"""Bytes of kept masks, and bytes that each counts beyond its own. A mask of 150,000 tokens has 19 KB."""
KEPT_EXPRESSIONS = 16


class Masks:
    """The kept masks of one vocabulary. Any thread may use them."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._residuals: OrderedDict[str, Residuals | None] = OrderedDict()
        self._masks: OrderedDict[tuple[Residuals, Hashable], Int32] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def place(self, regex: str) -> Place | None:
        """Returns the place at the beginning of an answer. None: this expression's masks are not kept."""
        with self._lock:
            known, found = regex in self._residuals, self._residuals.get(regex)
        if not known:
            with contextlib.suppress(ValueError):  # it is not followed
                found = Residuals(regex, self._vocabulary.most)
        with self._lock:
            found = self._residuals.setdefault(regex, found)
            self._residuals.move_to_end(regex)
            while len(self._residuals) > KEPT_EXPRESSIONS:
                self._forget(self._residuals.popitem(last=False)[1])
        return None if found is None else Place(found)

    def get(self, residuals: Residuals, key: Hashable) -> Int32 | None:
        """Returns a kept mask, or None. The caller must not write to the mask."""
        with self._lock:
            found = self._masks.get((residuals, key))
            if found is not None:
                self._masks.move_to_end((residuals, key))
            return found

    def keep(self, residuals: Residuals, key: Hashable, mask: Int32) -> None:
        """Keep a copy of the mask, unless its expression was dropped: the key would keep the whole expression in
        memory."""
        kept = mask.copy()
        kept.flags.writeable = False
        with self._lock:
            if (residuals, key) in self._masks or residuals not in self._residuals.values():
                return
            self._masks[residuals, key] = kept
            self._bytes += kept.nbytes + KEY_BYTES
            while self._bytes > KEPT_BYTES:
                self._bytes -= self._masks.popitem(last=False)[1].nbytes + KEY_BYTES

    def _forget(self, residuals: Residuals | None) -> None:
        for name in [name for name in self._masks if name[0] is residuals]:
            self._bytes -= self._masks.pop(name).nbytes + KEY_BYTES
