"""One choice's tokens in, its text out: detokenization, stop strings, and why it ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from llmcore.bridge import ChoiceEvent, Finish
from llmcore.protocols import Tokenizer
from llmcore.text.detokenizer import detokenizer
from llmcore.text.healing import Healing
from llmcore.text.stops import StopMatcher, StopStrings

_RUNNING, _STOP = Finish.RUNNING, Finish.STOP
"""Looked up once: an enum's members take their time, and every token is asked several times."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextRules:
    """How a request's tokens become text, and what ends it; one value for all its choices.

    `stop_tokens`: token sequences that end a choice. `keep_stop`: leave the stop text in (LightLLM) or trim it
    (OpenAI). `stop_ids`: the ids that the engine stops at, whose text is left out unless `keep_stop_id`.
    `keep_special_ids`: special tokens that have their text even so, because a parser reads it. `space_special_tokens`:
    a space stands between a special token's text and what is beside it (LightLLM).
    `min_tokens`: stop texts before the end of that many tokens do not count.
    """

    stops: StopStrings | None = None
    stop_tokens: tuple[tuple[int, ...], ...] = ()
    stop_ids: frozenset[int] = frozenset()
    keep_stop: bool = False
    keep_stop_id: bool = False
    skip_special_tokens: bool = True
    keep_special_ids: frozenset[int] = frozenset()
    space_special_tokens: bool = False
    min_tokens: int = 0


class ChoiceText:
    """The state of one choice.

    `finish`: why it ended, RUNNING until it has. `tokens`: how many it has so far; what comes after a stop text does
    not count. `must_finish`: the engine does not know yet that the choice ended, so the caller tells the bridge
    (`finish(request, choice, tokens)`). `released`: characters given out. `starts`: where in the choice's text each
    token of the last event begins, counted in characters before stop strings cut it. With `healing` the text repeats
    the end of the prompt first: that is left out, and the tokens asked for are counted behind it.
    """

    __slots__ = (
        *("_after_special", "_decoded", "_detokenizer", "_left", "_matcher", "_recent", "_rules", "_special_ids"),
        *("_unseen", "finish", "must_finish", "released", "starts", "tokens"),
    )

    def __init__(self, tokenizer: Tokenizer, rules: TextRules, healing: Healing | None = None):
        self.finish = _RUNNING
        self.tokens = 0
        self.must_finish = False
        self.released = 0
        self.starts: list[int] = []
        self._rules = rules
        self._detokenizer = detokenizer(
            tokenizer, skip_special_tokens=rules.skip_special_tokens, keep=rules.keep_special_ids
        )
        self._matcher = StopMatcher(rules.stops, keep=rules.keep_stop) if rules.stops is not None else None
        self._decoded = 0
        self._special_ids = tokenizer.special_ids if rules.space_special_tokens else None
        self._after_special = False
        self._unseen = 0 if healing is None else healing.characters
        self._left = None if healing is None else healing.most
        self._recent: deque[int] = deque(maxlen=max(map(len, rules.stop_tokens), default=0))

    def end(self) -> None:
        """End the choice here, as a stop string would."""
        self.must_finish = self.must_finish or self.finish is _RUNNING
        self.finish = Finish.STOP

    def feed(self, event: ChoiceEvent) -> list[str]:
        """The text that each token of `event` releases, "" where one is held.

        The list is shorter than the event's tokens when a stop text ends the choice, and holds one text without a
        token when an event ends a choice without one.
        """
        texts: list[str] = []
        self.starts = []
        last = len(event.tokens) - 1
        for i, token_id in enumerate(event.tokens):
            self.tokens += 1
            self.starts.append(self._decoded)
            ends_by_id = i == last and event.finish is _STOP and token_id in self._rules.stop_ids
            texts.append(self._take(token_id, ends_by_id))
            if self._left == 0 and self.finish is _RUNNING and (i < last or event.finish is _RUNNING):
                self.finish = Finish.LENGTH
                texts[-1] += self._flush()
            if self.finish is not _RUNNING:
                self.must_finish = event.finish is _RUNNING
                self._count(texts)
                return texts
        if event.finish is not _RUNNING:
            self.finish = event.finish
            rest = self._flush()
            if texts:
                texts[-1] += rest
            elif rest:
                texts.append(rest)
        self._count(texts)
        return texts

    def _take(self, token_id: int, ends_by_id: bool) -> str:
        if ends_by_id and not self._rules.keep_stop_id:
            return ""
        text = self._detokenizer.add(token_id)
        if self._left is not None:
            text = self._healed(text)
        if text and self._special_ids is not None:
            special = token_id in self._special_ids
            text = " " + text if self._decoded and (special or self._after_special) else text
            self._after_special = special
        self._decoded += len(text)
        if self.tokens < self._rules.min_tokens:
            return text
        if self._matcher is not None and text:
            text = self._matcher.feed(text)
            if self._matcher.found is not None:
                self.finish = Finish.STOP
                return text
        if self._rules.stop_tokens and self._ends_with_stop_tokens(token_id):
            self.finish = Finish.STOP
            text += self._flush()
        return text

    def _healed(self, text: str) -> str:
        """What of a token's text is not the prompt's; counts the token if it stands behind that."""
        behind = not self._unseen
        text, self._unseen = text[self._unseen :], max(0, self._unseen - len(text))
        if self._left is not None and (behind or text):
            self._left -= 1
        return text

    def _ends_with_stop_tokens(self, token_id: int) -> bool:
        self._recent.append(token_id)
        recent = tuple(self._recent)
        return any(recent[-len(stop) :] == stop for stop in self._rules.stop_tokens)

    def _flush(self) -> str:
        """What is still held; an unfinished character may complete a stop text no more."""
        rest = self._detokenizer.flush()
        self._decoded += len(rest)
        return (self._matcher.flush() if self._matcher is not None else "") + rest

    def _count(self, texts: Sequence[str]) -> None:
        for text in texts:
            self.released += len(text)
