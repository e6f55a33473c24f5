"""Limits of a grammar's cost, for the trial process and for the engine."""

from __future__ import annotations

from llguidance import LLParserLimits

COMPILE_SECONDS = 0.8
"""CPU seconds that reading and compiling a grammar may take."""

PATIENCE_SECONDS = 2.5
"""The same limit in wall-clock seconds, for when other processes use the CPU."""

MEMORY_BYTES = 3 << 29
"""Address space that compiling a grammar may take. A grammar that needs more ends its trial process."""

STACK_BYTES = 256 << 20
"""llguidance recurses through chains of rules with 3 KB per rule. Only touched pages of the stack use memory."""

LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_items_in_row=2_000,
    max_lexer_states=20_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
"""A lexer state takes 1 to 2 KB, so a choice takes at most about 40 MB. A mask takes at most about 20 ms."""
