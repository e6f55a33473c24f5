"""A logits processor: the answer is one of the given texts, `{"name": "choice", "args": {"texts": ["yes", "no"]}}`."""

import numpy as np
from llmcore.api import LogitsProcessorSpec, hookimpl, words_of


@hookimpl
def register_logits_processors():
    yield LogitsProcessorSpec(name="choice", make=f"{__name__}:make", kind="mask", example={"texts": ["yes", "no"]})


def make(args, context):
    texts = args.pop("texts", None)
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise ValueError('texts must be a list of texts, as in {"texts": ["yes", "no"]}')
    if args:
        raise ValueError(f"there is no argument {next(iter(args))!r}, only texts")
    encode = context.tokenizer().encode
    paths = [encode(text, add_special_tokens=False) for text in texts]
    return lambda prompt: Choice(paths, context.vocab_size)


class Choice:
    """api.MaskProcessor. `paths`: the token ids that may still come, one list per text."""

    def __init__(self, paths, vocab_size):
        self.paths = paths
        self.vocab_size = vocab_size

    def accept(self, token):
        self.paths = [path[1:] for path in self.paths if path[:1] == [token]]

    def finished(self):
        return [] in self.paths

    def mask(self):
        words = np.zeros(words_of(self.vocab_size), np.uint32)
        for path in self.paths:
            words[path[0] // 32] |= np.uint32(1 << path[0] % 32)
        return words.view(np.int32)
