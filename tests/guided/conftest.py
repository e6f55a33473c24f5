"""What plugin-guided is told of a tokenizer, and grammars that nothing hurries."""

from __future__ import annotations

from guided_answers import context, patient, tokenizer

__all__ = ["context", "patient", "tokenizer"]
