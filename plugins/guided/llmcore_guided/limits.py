"""Limits of a grammar's cost, for the process that tries it and for the one that uses it."""

from __future__ import annotations

from llguidance import LLParserLimits

COMPILE_SECONDS = 0.8
"""Of a processor, which a grammar may take to be read and compiled."""

PATIENCE_SECONDS = 2.5
"""The same of the clock, where others have the processors."""

STACK_BYTES = 256 << 20
"""llguidance recurses through chains of rules, 3 KB a rule; only what is touched of the stack becomes memory."""

LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_items_in_row=2_000,
    max_lexer_states=20_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
"""A state of the lexer takes one or two KB, so a choice at most some 40 MB; a mask takes some 20 ms at most."""
