"""A logits processor for tests and demonstrations: the answer is the text that the request gives."""

import numpy as np
from llmcore.api import words_of


def make(args, context):
    """Once per request. A ValueError is a 400 with its text."""
    text = args.get("text")
    if not isinstance(text, str) or not text or len(args) != 1:
        raise ValueError('it takes {"text": "what to say"}')
    ids = context.tokenizer().encode(text, add_special_tokens=False)

    def start(prompt):
        return Say(ids, words_of(context.vocab_size))

    return start


class Say:
    """llmcore.api.MaskProcessor: allows one token at a time."""

    def __init__(self, ids, words):
        self.ids, self.words, self.said = ids, words, 0

    def accept(self, token):
        self.said += 1

    def finished(self):
        return self.said == len(self.ids)

    def mask(self):
        if self.finished():
            return None
        word, bit = divmod(self.ids[self.said], 32)
        bits = np.zeros(self.words, np.uint32)
        bits[word] = 1 << bit
        return bits.view(np.int32)
