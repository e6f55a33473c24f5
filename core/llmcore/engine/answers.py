"""What `LLM.generate` returns, and how it comes together from events."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from llmcore.bridge import Bridge, ChoiceEvent, Finish, Submit
from llmcore.errors import RequestError
from llmcore.protocols import RequestRecord, Tokenizer
from llmcore.text.stream import ChoiceText, TextRules

FINISH_REASONS = {Finish.STOP: "stop", Finish.LENGTH: "length", Finish.ABORT: "abort", Finish.ERROR: "error"}


@dataclass
class Answer:
    """One choice. `logprobs`: of its tokens; `top_logprobs`: per token the best (id, logprob) pairs, if asked for.
    `scores`, `pooled` (f32): of the prompt, where they were asked for.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    scores: tuple[float, ...] = ()
    pooled: bytes = b""


@dataclass(frozen=True)
class Generated:
    """A prompt's answers; the properties are those of the first. `cached_tokens` of the prompt were not computed.

    `prompt_logprobs`: of every prompt token but the first, if asked for; `prompt_top`: the best (id, logprob) pairs in
    the place of each; `prompt_ranks`: how many tokens were likelier there, and one more.
    """

    prompt_ids: tuple[int, ...]
    cached_tokens: int
    answers: tuple[Answer, ...]
    prompt_logprobs: tuple[float, ...] = ()
    prompt_top: tuple[tuple[tuple[int, float], ...], ...] = ()
    prompt_ranks: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """Text, without the stop text that ended it."""
        return self.answers[0].text

    @property
    def token_ids(self) -> list[int]:
        """Token ids, an end-of-text id included."""
        return self.answers[0].token_ids

    @property
    def finish_reason(self) -> str:
        """`stop` or `length`."""
        return self.answers[0].finish_reason

    @property
    def logprobs(self) -> list[float]:
        """Natural log-probabilities, if asked for."""
        return self.answers[0].logprobs


class Collector:
    """Gathers one request's events, on the bridge's thread; calls `ended` once, and `text` with each piece of text."""

    def __init__(
        self,
        submit: Submit,
        tokenizer: Tokenizer,
        rules: TextRules,
        *,
        ended: Callable[[Collector], object],
        text: Callable[[str], object] | None = None,
    ) -> None:
        self.submit = submit
        self._ended = ended
        self._on_text = text
        self._texts = [ChoiceText(tokenizer, rules) for _ in range(submit.n)]
        self._answers = [Answer() for _ in range(submit.n)]
        self._running = submit.n
        self._cached = 0
        self._prompt_logprobs: tuple[float, ...] = ()
        self._prompt_top: tuple[tuple[tuple[int, float], ...], ...] = ()
        self._prompt_ranks: tuple[int, ...] = ()
        self._error: RequestError | None = None
        self._started = time.monotonic()
        self._first: float | None = None
        self._last = self._started

    def start(self, bridge: Bridge) -> None:
        """Submit the request."""
        self._bridge = bridge
        bridge.submit(self.submit, self.take)

    def take(self, event: ChoiceEvent) -> None:
        """The sink."""
        if self._error is not None:
            return
        if event.finish in (Finish.ERROR, Finish.ABORT):
            code, message = event.error or ("engine_failed", "the request was ended")
            self._error = RequestError(message, code=code)
            self._ended(self)
            return
        self._last = time.monotonic()
        self._first = self._first or self._last
        self._cached = max(self._cached, event.cached)
        self._prompt_logprobs = event.prompt_logprobs or self._prompt_logprobs
        self._prompt_top = event.prompt_top or self._prompt_top
        self._prompt_ranks = event.prompt_ranks or self._prompt_ranks
        text, answer = self._texts[event.choice], self._answers[event.choice]
        before = text.tokens
        piece = "".join(text.feed(event))
        answer.text += piece
        if self._on_text is not None and piece:
            self._on_text(piece)
        new = text.tokens - before
        answer.token_ids.extend(event.tokens[:new])
        if self.submit.sampling.logprobs is not None:
            answer.logprobs.extend(event.logprobs[:new])
            answer.top_logprobs.extend(event.top[:new])
        answer.scores, answer.pooled = event.scores, event.pooled
        if text.must_finish:
            self._bridge.finish(self.submit.id, event.choice, text.tokens)
        if text.finish is not Finish.RUNNING:
            answer.finish_reason = FINISH_REASONS[text.finish]
            self._running -= 1
            if not self._running:
                self._ended(self)

    def raise_error(self) -> None:
        """Raise what ended the request, if it failed."""
        if self._error is not None:
            raise self._error

    def result(self) -> Generated:
        """All answers; every choice must have ended."""
        known = self._prompt_logprobs, self._prompt_top, self._prompt_ranks
        return Generated(self._prompt_ids(), self._cached, tuple(self._answers), *known)

    def record(self) -> RequestRecord:
        """The figures for `on_request_finished`."""
        reasons = [answer.finish_reason or "abort" for answer in self._answers]
        failed = "error" if self._error is not None else None
        return RequestRecord(
            request_id=str(self.submit.id),
            dialect="python",
            prompt_tokens=len(self.submit.prompt) // 4,
            cached_tokens=self._cached,
            output_tokens=sum(len(answer.token_ids) for answer in self._answers),
            max_new_tokens=self.submit.max_new_tokens,
            finish=failed or ("length" if "length" in reasons else reasons[0]),
            first_token=None if self._first is None else self._first - self._started,
            duration=self._last - self._started,
        )

    def _prompt_ids(self) -> tuple[int, ...]:
        return tuple(memoryview(self.submit.prompt).cast("i"))
