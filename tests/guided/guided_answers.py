"""Answers under a grammar of plugin-guided, token by token."""

from __future__ import annotations

from typing import Any

import numpy as np
from llmcore.api import ProcessorContext, Tokenizer, words_of
from llmcore_devtools.tokenizer import EOS
from llmcore_guided.processor import Guided, make

VOCAB = 301
"""More than the tokenizer has."""


def one(context: ProcessorContext, **args: Any) -> Guided:
    return make(args, context)(np.zeros(1, np.int32))


def allowed(processor: Guided) -> list[int]:
    words = processor.mask()
    assert words.shape == (words_of(VOCAB),) and words.dtype == np.int32
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    return [int(bit) for bit in np.flatnonzero(bits)]


def spell(processor: Guided, tokenizer: Tokenizer, text: str) -> bool:
    """Whether the text's own tokens are let through and may end the answer."""
    ended = False
    for token in tokenizer.encode(text, add_special_tokens=False):
        if ended or token not in allowed(processor):
            return False
        processor.accept(token)
        ended = processor.finished()
    return ended or EOS in allowed(processor)
