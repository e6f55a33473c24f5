"""What a policy's Decision must satisfy, and what happens in its place when it does not."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmcore.protocols import Decision
from llmcore.sched.job import NO_ROW
from llmcore.sched.view import StepView

PATIENCE = 64
"""Steps in a row that may pass over the oldest request that could run."""


def fault(decision: Decision, view: StepView, places: int) -> str | None:
    """What is wrong with `decision` (None: nothing); `places` is the number of rows of the request table."""
    rows, n_query = np.asarray(decision.rows), np.asarray(decision.n_query)
    if not rows.size and not n_query.size:
        rows = n_query = view.running[:0]
    if rows.ndim != 1 or rows.shape != n_query.shape or not _integral(rows) or not _integral(n_query):
        return "rows and n_query are not two columns of integers of one length"
    if rows.size and (rows.min() < 0 or rows.max() >= places):
        return "it names a row that does not exist"
    allowed = np.zeros(places, np.int32)
    allowed[view.running] = view.remaining
    if (n_query < 1).any() or (n_query > allowed[rows]).any():
        return "it computes more of a request than remains, or nothing of it, or one that cannot run"
    if rows.size and np.bincount(rows).max() > 1:
        return "it names a request twice"
    if (n_query > view.chunk).any():
        return f"a row has more than {view.chunk} tokens"
    if view.whole and (n_query < np.minimum(allowed[rows], view.chunk)).any():
        return "it cuts a prompt in pieces where prompts are computed whole"
    if decision.admit:
        problem = _admission_fault(decision, view)
        if problem is not None:
            return problem
    total = int(n_query.sum()) + sum(first for _, first in decision.admit)
    if total > view.budget:
        return f"its rows have {total} tokens; the budget is {view.budget}"
    return None


def oldest_first(view: StepView) -> Decision:
    """The least that makes progress: what runs in order of arrival, and the head of the queue if nothing does."""
    wish = np.minimum(view.remaining, view.chunk)
    before = np.cumsum(wish) - wish
    n_query = np.minimum(wish, np.maximum(view.budget - before, 0)).astype(np.int32)
    if view.whole:
        n_query[n_query < wish] = 0
    rows = np.flatnonzero(n_query)
    if rows.size:
        return Decision(view.running[rows], n_query[rows])
    for candidate in view.waiting():
        if view.fits(candidate):
            first = min(candidate.tokens - candidate.cached, view.chunk, view.budget)
            return Decision(view.running[:0], n_query[:0], [(candidate.index, first)])
        break
    return Decision(view.running[:0], n_query[:0])


def _admission_fault(decision: Decision, view: StepView) -> str | None:
    if not view.admit:
        return "it admits a request in a step in which none may join"
    if len({index for index, _ in decision.admit}) < len(decision.admit):
        return "it admits a request twice"
    for index, first in decision.admit:
        if not 0 <= index < len(view.offers):
            return "it admits a request that was not offered"
        job, hit = view.offers[index]
        if job.row == NO_ROW:
            return "it admits a request without asking whether it fits, or one that does not"
        if not 1 <= first <= min(job.size - hit.tokens, view.chunk):
            return "the first chunk of an admitted request is empty, or longer than what remains or than a chunk"
        if view.whole and first < min(job.size - hit.tokens, view.chunk):
            return "it cuts a prompt in pieces where prompts are computed whole"
    return None


def _integral(column: NDArray[np.generic]) -> bool:
    return not column.size or column.dtype.kind in "iu"
