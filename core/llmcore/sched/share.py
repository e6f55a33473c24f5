"""A step's tokens as a scheduling policy gives them away: the part that policies have in common."""

from __future__ import annotations

import numpy as np

from llmcore.protocols import Decision, Int32, SchedulerView, WaitingRequest


class Share:
    """One token to each row that decodes; the policy gives the rest to prompts, in its own order.

    It keeps to the budgets of `view`. With `may_pause`, a whole prompt that does not fit beside the rows that decode
    takes their tokens, and `paused` is True afterwards. A policy allows that at most every other step.
    """

    def __init__(self, view: SchedulerView, *, may_pause: bool = False) -> None:
        self._view = view
        self._may_pause = view.whole and may_pause
        self._decodes = view.remaining == 1
        self._n_query: Int32 = self._decodes.astype(np.int32)
        self._admit: list[tuple[int, int]] = []
        left = view.budget - int(np.count_nonzero(self._decodes))
        if left < 0:
            self._n_query[np.flatnonzero(self._decodes)[left:]] = 0
        self.paused = False
        self.left = max(0, min(left, view.prompt_budget))
        """Tokens that prompts may still have."""

    @property
    def open(self) -> bool:
        """True while another prompt may get something."""
        return self.left > 0 or self._may_pause

    def prompts(self) -> Int32:
        """Places of prompts in `view.running`, oldest first."""
        return np.flatnonzero(~self._decodes).astype(np.int32)

    def compute(self, row: int) -> None:
        """Give the prompt at `row` of `view.running` all it can have."""
        self._n_query[row] = self._take(int(self._view.remaining[row]))

    def admit(self, candidate: WaitingRequest) -> bool:
        """Admit `candidate` if there is room for it; False if no other may follow."""
        need = candidate.tokens - candidate.cached
        if not self._can_have(need) or not self._view.fits(candidate):
            self._close()
            return False
        self._admit.append((candidate.index, self._take(need)))
        return self.open

    def decision(self) -> Decision:
        """The plan of the step."""
        rows = np.flatnonzero(self._n_query)
        return Decision(self._view.running[rows], self._n_query[rows], self._admit)

    def _can_have(self, need: int) -> bool:
        if self._may_pause:
            return True
        return self.left > 0 and (not self._view.whole or min(need, self._view.budget) <= self.left)

    def _take(self, need: int) -> int:
        """Take tokens for a prompt that needs `need`; a whole prompt gets all or none, and none closes the step."""
        view = self._view
        if not self._can_have(need):
            self._close()
            return 0
        tokens = min(need, view.budget) if view.whole else min(need, view.chunk, self.left)
        if tokens > self.left:
            self._n_query[self._decodes] = 0
            self.left, self.paused = view.budget, True
        self.left -= tokens
        self._may_pause = False
        return tokens

    def _close(self) -> None:
        """A whole prompt that waits for room is not overtaken."""
        if self._view.whole:
            self.left, self._may_pause = 0, False
