"""The tokens beside the text of an answer: their names, their log-probabilities, and when they are shown.

`released_by_token` is for dialects that answer token by token: each token has the text that it released, which may be
empty. `UnshownTokens` is for those that answer with text. It shows a token once text that begins after the token's
start has been released. So entries and text arrive in step, and a token that a stop string cut away, or that only
ends the answer, never appears.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from llmcore.api.bridge import MOST_LOGPROBS_AT_ONCE, ChoiceEvent, Finish
from llmcore.api.errors import RequestError
from llmcore.api.protocols import Tokenizer

from llmcore_server.chat.request_parsing import Choice

LOWEST = -9999.0
"""The number for minus infinity, which JSON does not have."""


@dataclass(frozen=True)
class LogprobsLimit:
    """At most `most` log-probabilities of generated tokens, with the best in every place, in `what`."""

    most: int
    what: str


WHOLE_ANSWER = LogprobsLimit(1 << 20, "an answer that is not a stream")
"""Over all choices: they take 8 MB until the answer is sent, and 60 to 90 MB of JSON. A stream keeps none."""

BEAM_SEARCH = LogprobsLimit(MOST_LOGPROBS_AT_ONCE, "a beam search")
"""Of one prompt, because its answers come together. If the best in every place are asked for, all beams count: only
the end of the search tells which of them are answers."""

Best = Sequence[tuple[int, float]]
"""The likeliest tokens in one place, as (id, log-probability)."""

Place = tuple[int, int, float, Best]
"""One token of an answer: (mark, id, log-probability, the best in its place). The dialect says what the mark is:
where the token's text begins or ends, or its rank."""


def clamped(logprob: float) -> float:
    """`logprob`, or the lowest number that an answer shows."""
    return logprob if logprob > LOWEST else LOWEST


class Places:
    """The tokens of one choice as columns: 16 bytes for each, and 8 for each of the best in its place.

    Iterating gives a `Place` for each token, (mark, id, log-probability, the best (id, log-probability) pairs in its
    place), as often as it is done. Log-probabilities are kept as f32, which is what the engine computes.
    """

    __slots__ = ("_best_ids", "_best_logprobs", "_ends", "_ids", "_logprobs", "_marks")

    def __init__(self) -> None:
        self._marks, self._ids, self._ends, self._best_ids = array("i"), array("i"), array("i"), array("i")
        self._logprobs, self._best_logprobs = array("f"), array("f")

    def __iter__(self) -> Iterator[Place]:
        begin = 0
        for at, end in enumerate(self._ends):
            best = tuple(zip(self._best_ids[begin:end], self._best_logprobs[begin:end], strict=True))
            yield self._marks[at], self._ids[at], self._logprobs[at], best
            begin = end

    def add(self, mark: int, token: int, logprob: float, best: Best = ()) -> None:
        """Keep one more token."""
        self._marks.append(mark)
        self._ids.append(token)
        self._logprobs.append(logprob)
        if best:
            ids, logprobs = zip(*best, strict=True)
            self._best_ids.extend(ids)
            self._best_logprobs.extend(logprobs)
        self._ends.append(len(self._best_ids))

    def extend(self, places: Iterable[Place]) -> None:
        """Keep more tokens."""
        for place in places:
            self.add(*place)


def room_for_logprobs(
    left: int,
    asked: int | None,
    *,
    choices: int,
    each: int,
    param: str,
    limit: LogprobsLimit = WHOLE_ANSWER,
) -> int:
    """The most tokens that each of `choices` answers of a request may have: `left`, or fewer if `each`
    log-probabilities per token would be more than `limit` allows.

    Raises RequestError where the client has named numbers that cannot fit: `asked` tokens in field `param`.
    """
    fits = limit.most // (choices * each)
    if left <= fits or asked is None or asked <= fits:
        return min(left, fits)
    answers = "one answer" if choices == 1 else f"{choices:,} answers"
    raise RequestError(
        f"{param}: {asked:,} tokens in {answers} with {each} log-probabilities per token make "
        f"{asked * choices * each:,}; {limit.what} has at most {limit.most:,}. Ask for at most {fits:,} tokens, for "
        "fewer answers, or for fewer log-probabilities per token.",
        param=param,
        code="invalid_value",
    )


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
    and `best` is empty, if the request did not ask for them. `ends`: it is the last one of the choice.
    """

    text: str
    token: int | None
    logprob: float
    best: Best
    ends: bool


def released_by_token(choice: Choice, event: ChoiceEvent, texts: Sequence[str]) -> Iterator[Released]:
    """The arguments of `Writer.write`, token by token. The end of a choice always has a text, perhaps an empty one."""
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
