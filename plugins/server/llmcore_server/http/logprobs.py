"""Log-probabilities as JSON can hold them, how they are kept until an answer is sent, and how many of them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from llmcore.api.bridge import MOST_LOGPROBS_AT_ONCE
from llmcore.api.errors import RequestError

LOWEST = -9999.0
"""What stands for minus infinity, which JSON does not have."""


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
