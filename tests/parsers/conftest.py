"""Grammars of calls are compiled by plugin-guided."""

from __future__ import annotations

from guided_answers import context, patient, tokenizer

__all__ = ["context", "patient", "tokenizer"]
