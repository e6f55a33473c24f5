"""Stop strings, found across tokens. Text that may become part of a stop string is held back.

All stop strings of a request share one automaton (Aho-Corasick). Its state is the longest end of the text that begins
a stop string; this end is held back. The work is one step per character for any number of stop strings.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """The automaton for a request's stop strings. It is immutable; the choices share it. Strings must not be empty."""

    __slots__ = ("depth", "fail", "first", "goto", "length")

    def __init__(self, stops: Sequence[str]):
        self.goto: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.length = [0]
        """For each state, the length of the longest stop string that ends there, or 0."""
        self.fail = [0]
        for stop in stops:
            self._add(stop)
        self.first = frozenset(self.goto[0])
        self._link()

    def _add(self, stop: str) -> None:
        state = 0
        for char in stop:
            following = self.goto[state].get(char)
            if following is None:
                following = len(self.goto)
                self.goto[state][char] = following
                self.goto.append({})
                self.depth.append(self.depth[state] + 1)
                self.length.append(0)
                self.fail.append(0)
            state = following
        self.length[state] = len(stop)

    def _link(self) -> None:
        """Compute `fail` breadth first: the state of the longest shorter end of the text that begins a stop string."""
        queue = deque(self.goto[0].values())
        while queue:
            state = queue.popleft()
            # A stop string may also end in the middle of a longer one.
            self.length[state] = self.length[state] or self.length[self.fail[state]]
            for char, following in self.goto[state].items():
                self.fail[following] = self.step(self.fail[state], char)
                queue.append(following)

    def step(self, state: int, char: str) -> int:
        """The state after `char`."""
        while True:
            following = self.goto[state].get(char)
            if following is not None:
                return following
            if state == 0:
                return 0
            state = self.fail[state]


class StopMatcher:
    """Finds stop strings in the text of one choice.

    `found`: the stop string that ended the text, or None. The first complete stop string ends the text. If several end
    at the same character, it is the longest one.
    """

    __slots__ = ("_held", "_keep", "_state", "_stops", "found")

    def __init__(self, stops: StopStrings, *, keep: bool):
        self._stops = stops
        self._keep = keep
        self._state = 0
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str) -> str:
        """Cut the text at the first stop string. Returns what may be shown now; `keep` includes the stop string."""
        stops, state = self._stops, self._state
        if not state and stops.first.isdisjoint(text):
            return text  # This is the usual case: no character begins a stop string.
        whole = self._held + text
        for at, char in enumerate(text, start=len(self._held) + 1):
            state = stops.step(state, char)
            length = stops.length[state]
            if length:
                self.found = whole[at - length : at]
                self._held = ""
                return whole[: at if self._keep else at - length]
        self._state = state
        shown = len(whole) - stops.depth[state]
        self._held = whole[shown:]
        return whole[:shown]

    def flush(self) -> str:
        """The held text, for a choice that ends for another reason."""
        held, self._held = self._held, ""
        return held
