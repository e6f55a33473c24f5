"""The tokens of one choice become text: the detokenizer, stop strings, and the finish reason."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from llmcore.api.bridge import ChoiceEvent, Finish
from llmcore.api.protocols import Tokenizer
from llmcore.text.detokenizer import detokenizer
from llmcore.text.stops import StopMatcher, StopStrings

_RUNNING, _STOP = Finish.RUNNING, Finish.STOP
"""Looked up once, because access to an enum's members is slow, and every token needs it several times."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextRules:
    """The rules by which a request's tokens become text and end; all its choices share them.

    `stops`: the stop strings.
    `stop_tokens`: token sequences that end a choice.
    `stop_ids`: the ids at which the engine stops. Their text is left out unless `keep_stop_id`.
    `keep_stop`: True leaves the stop string in the text (LightLLM), False cuts it off (OpenAI).
    `keep_special_ids`: special tokens to show although others are skipped, because a parser reads them.
    `space_special_tokens`: put a space between a special token and its neighbours (LightLLM).
    `min_tokens`: stop strings and stop tokens do not count before a choice has this number of tokens.
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


@dataclass(frozen=True)
class Healing:
    """The end of a prompt that was removed, so that the model writes it again (token healing).

    It has `tokens` tokens with `characters` of text. `most`: the client's max_new_tokens.
    """

    tokens: int
    characters: int
    most: int


class ChoiceText:
    """The text of one choice.

    `finish`: the reason of its end; RUNNING before that.
    `tokens`: the number of its tokens, without those after a stop string.
    `must_finish`: True if the engine does not know yet that the choice ended. The caller then tells the bridge
      (`finish(request, choice, tokens)`).
    `released`: the number of characters that `feed` has returned.
    `starts`: for each token of the last event, its first character in the text before stop strings cut it.

    With `healing` the text first repeats the end of the prompt. ChoiceText leaves this part out, and counts the
    client's max_new_tokens from its end.
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
        """End the choice here, as a stop string does."""
        self.must_finish = self.must_finish or self.finish is _RUNNING
        self.finish = Finish.STOP

    def feed(self, event: ChoiceEvent) -> list[str]:
        """The text that each token of `event` releases, or "" if it is held back.

        The list is shorter than the event's tokens if a stop string ends the choice. If an event without tokens ends
        the choice, the list may have one text.
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
        """The part of a token's text that does not repeat the prompt. Counts tokens that do not only repeat it."""
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
        """The held text. A stop string is not searched in an unfinished character at the end."""
        rest = self._detokenizer.flush()
        self._decoded += len(rest)
        return (self._matcher.flush() if self._matcher is not None else "") + rest

    def _count(self, texts: Sequence[str]) -> None:
        for text in texts:
            self.released += len(text)
