"""Tokens beside the text of an answer: how they are called, and when they are shown.

`released_by_token` is for dialects that answer token by token: each token has the text that it released, which may be
none. `UnshownTokens` is for those that answer with text: a token is shown once text that begins after it starts has
been released, so that entries and text arrive in step, and tokens that a stop string cut away, or that only end the
answer, never appear.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from llmcore.api.bridge import ChoiceEvent, Finish
from llmcore.api.protocols import Tokenizer

from llmcore_server.http.choice import Choice
from llmcore_server.http.logprobs import Best, Place

_MOST_NAMES = 4096
"""Texts that are kept: log-probabilities name the same few tokens over and over, and a vocabulary is large."""


class TokenNames:
    """Tokens as text and bytes. `prefix` stands before the escapes of a token that is not a whole text. `ids`: the
    text is `token_id:` and the token's id instead, as vLLM's `return_tokens_as_token_ids` has it."""

    def __init__(self, tokenizer: Tokenizer, prefix: str = "", *, ids: bool = False):
        self._tokenizer = tokenizer
        self._prefix = prefix
        self._ids = ids
        self._texts: dict[int, str] = {}

    def bytes(self, token_id: int) -> bytes:
        """The token's bytes; none for ids that pad the model's vocabulary."""
        return self._tokenizer.token_bytes(token_id) if token_id < self._tokenizer.vocab_size else b""

    def text(self, token_id: int) -> str:
        """The token's text, or its bytes escaped, or its id."""
        text = self._texts.get(token_id)
        if text is None:
            if len(self._texts) == _MOST_NAMES:
                self._texts.clear()
            text = self._texts[token_id] = self._text(token_id)
        return text

    def _text(self, token_id: int) -> str:
        if self._ids:
            return f"token_id:{token_id}"
        raw = self.bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return self._prefix + "".join(f"\\x{byte:02x}" for byte in raw)


class UnshownTokens:
    """The tokens of one choice whose text has not been released; a place's mark is where its text begins.

    `whole`: at the end of the choice those that have no text are shown, too. `none`: nothing ever is.
    """

    def __init__(self, *, whole: bool = False, none: bool = False) -> None:
        self._whole, self._none = whole, none
        self._waiting: deque[Place] = deque()

    def take(self, choice: Choice, event: ChoiceEvent) -> list[Place]:
        """The tokens whose text `event` released."""
        if self._none:
            return []
        ended = self._whole and choice.text.finish is not Finish.RUNNING
        for i, start in enumerate(choice.text.starts):
            logprob = event.logprobs[i] if event.logprobs else 0.0
            self._waiting.append((start, event.tokens[i], logprob, event.top[i] if event.top else ()))
        shown = []
        while self._waiting and (ended or self._waiting[0][0] < choice.text.released):
            shown.append(self._waiting.popleft())
        return shown


class Released(NamedTuple):
    """A text and the token that released it. `token`: None where the end of the choice released it. `logprob` is 0.0,
    and `best` is empty, where nobody asked for them. `ends`: nothing of the choice comes after it.
    """

    text: str
    token: int | None
    logprob: float
    best: Best
    ends: bool


def released_by_token(choice: Choice, event: ChoiceEvent, texts: Sequence[str]) -> Iterator[Released]:
    """What `Writer.write` was given, token by token. The end of a choice always has a text, perhaps an empty one."""
    ended = choice.text.finish is not Finish.RUNNING
    if ended and not texts:
        texts = ("",)  # the end came without a token
    for i, text in enumerate(texts):
        yield Released(
            text,
            event.tokens[i] if i < len(event.tokens) else None,
            event.logprobs[i] if i < len(event.logprobs) else 0.0,
            event.top[i] if i < len(event.top) else (),
            ended and i == len(texts) - 1,
        )
