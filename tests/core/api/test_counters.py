"""Counters of one process: totals, gaps, and a sentence for each."""

from __future__ import annotations

from llmcore.api.counters import CAUSES, COUNTS, GAP_SECONDS, Tallies
from llmcore_server.messages import counts, rows


def test_counts_and_gaps_are_totals() -> None:
    tallies = Tallies()
    tallies.count("plugin_failures", "acme", "on_startup")
    tallies.count("plugin_failures", "acme", "on_startup", n=2)
    tallies.set("dropped_messages", "worker-0", total=0)
    for seconds in (0.0005, 0.001, 0.004, 99.0):
        tallies.gap(seconds)
    figures = tallies.figures()
    assert figures.counts == {("plugin_failures", ("acme", "on_startup")): 3}, "what never happened is not there"
    assert (figures.gaps[0], figures.gaps[3], figures.gaps[-1], sum(figures.gaps)) == (2, 1, 1, 4)
    assert len(figures.gaps) == len(GAP_SECONDS) + 1
    assert counts(rows(figures)) == figures.counts


def test_everything_has_a_sentence() -> None:
    assert all(text.endswith(".") for _, text in COUNTS.values())
    assert all(text and not text.endswith(".") for text in CAUSES.values())
