"""Beam search: which continuations of a request's sequences go on, and which of the ended ones are its answers.

The rules are those of transformers' `generate(num_beams=...)`, down to f32 scores. A search is a value of its own: it
hears the best next tokens of every running beam and says how each goes on. Nothing is told to the client before the
search is over, so it may start again from the prompt at any time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from llmcore.api.bridge import MOST_LOGPROBS_AT_ONCE, Finish, SamplingParams, Submit
from llmcore.api.errors import RequestError
from llmcore.api.protocols import Int32

Float32 = NDArray[np.float32]

LARGEST_PENALTY = 5.0
"""Largest length penalty, either way: a length to its power has to stay a number."""


@dataclass(frozen=True, slots=True)
class Path:
    """An answer's last token, behind all before it. `top`: the best (id, logprob) pairs in its place."""

    before: Path | None
    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    length: int

    def tokens(self) -> list[Path]:
        """All of them, the first one first."""
        found: list[Path] = []
        at: Path | None = self
        while at is not None:
            found.append(at)
            at = at.before
        return found[::-1]


@dataclass(frozen=True, slots=True)
class Continuation:
    """Beam `parent` with one more token, the last one of `path`: it goes on, or it ends with `finish`."""

    parent: int
    path: Path
    finish: Finish
    score: np.float32
    """The sum of its log-probabilities. An answer's is divided by its length to the power of the penalty."""


def considered(submit: Submit) -> int:
    """The number of best continuations over all beams that are looked at, so that enough go on when others end."""
    assert submit.beams is not None
    return max(2, 1 + len(submit.stop_ids)) * submit.beams.width


def candidates(submit: Submit) -> int:
    """The number of best next tokens of a beam that the search needs."""
    needed = considered(submit) + (len(submit.stop_ids) if submit.min_new_tokens > 0 else 0)
    return max(needed, submit.sampling.logprobs or 0)


def searching(submit: Submit) -> Submit:
    """The request that the engine computes for every beam of `submit`: a greedy answer whose tokens do not matter."""
    sampling = SamplingParams(temperature=0.0, logprobs=candidates(submit))
    return msgspec.structs.replace(submit, sampling=sampling, min_new_tokens=0)


def check_search(submit: Submit, vocab_size: int) -> None:
    """Raise RequestError for what a beam search, which `submit` asks for, cannot do."""
    assert submit.beams is not None
    plain = {"temperature": (0.0, 1.0), "seed": None, "logprobs": None}
    for name in SamplingParams.__struct_fields__:
        value, default = getattr(submit.sampling, name), getattr(SamplingParams(), name)
        allowed = plain.get(name, (default,))
        if allowed is not None and value not in allowed:
            raise RequestError(
                f"{name}: a beam search compares the model's own probabilities; leave it out",
                param=name,
                code="unsupported_parameter",
            )
    top = submit.sampling.logprobs
    # The best in every place are kept for all beams, because it is not known before the end which are answers.
    kept = 0 if top is None else (submit.choices if top else submit.n) * submit.max_new_tokens * (1 + top)
    if kept > MOST_LOGPROBS_AT_ONCE:
        raise RequestError(
            f"logprobs: a beam search keeps at most {MOST_LOGPROBS_AT_ONCE:,} log-probabilities, and this one might "
            f"keep {kept:,}; ask for fewer tokens, fewer beams, or fewer log-probabilities per token",
            param="logprobs",
            code="invalid_value",
        )
    if not abs(submit.beams.length_penalty) <= LARGEST_PENALTY:  # the comparison is False for NaN
        raise RequestError(
            f"length_penalty: give a number from -{LARGEST_PENALTY:g} to {LARGEST_PENALTY:g}",
            param="length_penalty",
            code="invalid_value",
        )
    if candidates(submit) + len(submit.stop_ids) > vocab_size:
        raise RequestError(
            f"num_beams: {submit.beams.width} beams need more tokens to choose from than the vocabulary has",
            param="num_beams",
            code="invalid_value",
        )


class Beams:
    """The search of one request: `submit` as the client sent it.

    Beams are numbered by the place in which they run. There is one until the first tokens were chosen.
    """

    def __init__(self, submit: Submit) -> None:
        assert submit.beams is not None
        self.submit = submit
        self.width = submit.beams.width
        """Beams that run side by side."""
        self._search = submit.beams
        self._stops = frozenset(submit.stop_ids)
        self.restart()

    def restart(self) -> None:
        """Forget everything behind the prompt."""
        self._scores = [np.float32(0.0)]
        self._paths: list[Path | None] = [None]
        self._heard: dict[int, tuple[Int32, Float32]] = {}
        self._ended: list[Continuation] = []

    def hear(self, beam: int, ids: Int32, logprobs: Float32) -> bool:
        """The best next tokens of a beam, best first; whether all beams' are there now."""
        self._heard[beam] = ids, logprobs
        return len(self._heard) == len(self._paths)

    def choose(self) -> list[Continuation] | None:
        """The continuation of each place, by its number; None if the search is over."""
        best = self._best()
        self._heard = {}
        length = best[0].path.length
        running = [one for one in best if one.finish is Finish.RUNNING][: self.width]
        for one in best[: self.width]:
            if one.finish is not Finish.RUNNING:
                score = one.score / np.float32(length**self._search.length_penalty)
                self._ended.append(replace(one, score=score))
        self._ended = sorted(self._ended, key=lambda ended: -ended.score)[: self.width]
        if not running or not self._improvable(running[0].score, length):
            return None
        placed = self._placed(running)
        self._scores = [one.score for one in placed]
        self._paths = [one.path for one in placed]
        return placed

    def answers(self) -> list[Continuation]:
        """The `n` best, best first."""
        return self._ended[: self.submit.n]

    def _best(self) -> list[Continuation]:
        """The best continuations over all beams, best first."""
        produced = 0 if self._paths[0] is None else self._paths[0].length  # all beams are of one length
        barred = self._stops if produced < self.submit.min_new_tokens else ()
        found: list[tuple[np.float32, int, int]] = []
        for beam, (ids, logprobs) in sorted(self._heard.items()):
            scores = zip(ids.tolist(), self._scores[beam] + logprobs, strict=True)
            found += [(score, beam, i) for i, (token, score) in enumerate(scores) if token not in barred]
        found.sort(key=lambda one: -one[0])
        return [self._continuation(*one) for one in found[: considered(self.submit)]]

    def _continuation(self, score: np.float32, beam: int, i: int) -> Continuation:
        ids, logprobs = self._heard[beam]
        before, tops = self._paths[beam], self.submit.sampling.logprobs or 0
        top = tuple(zip(ids[:tops].tolist(), logprobs[:tops].tolist(), strict=True))
        length = 1 if before is None else before.length + 1
        path = Path(before, int(ids[i]), float(logprobs[i]), top, length)
        limit = Finish.LENGTH if length >= self.submit.max_new_tokens else Finish.RUNNING
        return Continuation(beam, path, Finish.STOP if path.token in self._stops else limit, score)

    def _improvable(self, best: np.float32, length: int) -> bool:
        """True if a running beam might become better than the worst of the ended ones that are kept."""
        if len(self._ended) < self.width:
            return True
        if self._search.early_stopping:
            return False
        penalty = self._search.length_penalty
        if self._search.early_stopping is None and penalty > 0:
            length = self.submit.max_new_tokens
        return bool(best / np.float32(length**penalty) > self._ended[-1].score)

    def _placed(self, running: list[Continuation]) -> list[Continuation]:
        """By place: the best one of a beam stays in its parent's place. The others take the free places."""
        places: list[Continuation | None] = [None] * self.width
        others: list[Continuation] = []
        for one in running:
            if places[one.parent] is None:
                places[one.parent] = one
            else:
                others.append(one)
        return [others.pop(0) if one is None else one for one in places]
