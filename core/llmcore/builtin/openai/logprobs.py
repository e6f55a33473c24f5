"""Log-probabilities as OpenAI's two endpoints show them.

A token is shown once text that begins after it starts has been released, so that entries and text arrive in step, and
tokens that a stop string cut away, or that only end the answer, never appear.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from llmcore.api import ChoiceEvent, Finish, Tokenizer
from llmcore.api.http import Choice, clamped

Best = tuple[tuple[int, float], ...]


class TokenNames:
    """Tokens as text and bytes. `prefix` stands before the escapes of a token that is no whole text."""

    def __init__(self, tokenizer: Tokenizer, prefix: str = ""):
        self._tokenizer = tokenizer
        self._prefix = prefix
        # Prompts' log-probabilities name the same few tokens over and over.
        self._texts: dict[int, str] = {}

    def bytes(self, token_id: int) -> bytes:
        """The token's bytes; none for ids that pad the model's vocabulary."""
        return self._tokenizer.token_bytes(token_id) if token_id < self._tokenizer.vocab_size else b""

    def text(self, token_id: int) -> str:
        """The token's text, or its bytes escaped."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self._text(token_id)
        return text

    def _text(self, token_id: int) -> str:
        raw = self.bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return self._prefix + "".join(f"\\x{byte:02x}" for byte in raw)


class Pending:
    """The tokens of one choice whose text has not been released: (start, id, logprob, best).

    `whole`: at the end of the choice those that have no text are shown, too. `none`: nothing ever is.
    """

    def __init__(self, *, whole: bool = False, none: bool = False) -> None:
        self._whole, self._none = whole, none
        self._waiting: deque[tuple[int, int, float, Best]] = deque()

    def take(self, choice: Choice, event: ChoiceEvent) -> list[tuple[int, int, float, Best]]:
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


def chat_entries(names: TokenNames, shown: list[tuple[int, int, float, Best]]) -> list[dict[str, Any]]:
    """`logprobs.content` of chat completions."""
    return [
        {**_entry(names, token, logprob), "top_logprobs": [_entry(names, other, p) for other, p in best]}
        for _, token, logprob, best in shown
    ]


def _entry(names: TokenNames, token: int, logprob: float) -> dict[str, Any]:
    return {"token": names.text(token), "logprob": clamped(logprob), "bytes": list(names.bytes(token))}


def completion_entries(names: TokenNames, shown: list[tuple[int, int, float, Best]]) -> dict[str, list[Any]]:
    """`logprobs` of completions: columns over tokens."""
    return {
        "tokens": [names.text(token) for _, token, _, _ in shown],
        "token_logprobs": [clamped(logprob) for _, _, logprob, _ in shown],
        "top_logprobs": [
            {names.text(other): clamped(p) for other, p in (*best, (token, logprob))}
            for _, token, logprob, best in shown
        ],
        "text_offset": [start for start, _, _, _ in shown],
    }
