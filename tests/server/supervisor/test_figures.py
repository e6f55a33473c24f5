"""Figures of a server: totals of processes that die and are replaced."""

from __future__ import annotations

from llmcore.api.counters import GAP_SECONDS, ServerFigures
from llmcore_server.supervisor.figures import Sum


def of(n: int) -> ServerFigures:
    gaps = [0] * (len(GAP_SECONDS) + 1)
    gaps[1] = n
    return ServerFigures({("error_answers", ("404", "not_found")): n}, tuple(gaps), n / 100)


def test_a_process_that_begins_anew_loses_nothing() -> None:
    total = Sum()
    total.heard("worker-0", of(5))
    total.heard("worker-0", of(7))
    total.heard("worker-1", of(1))
    total.heard("worker-0", of(2))  # another one of that name
    total.heard("worker-0", of(2))
    figures = total.figures()
    assert figures.counts == {("error_answers", ("404", "not_found")): 10}
    assert figures.gaps[1] == 10 and round(figures.gap_seconds, 9) == 0.10
