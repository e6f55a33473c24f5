"""Each dialect on a scripted bridge."""

from __future__ import annotations

from dialect_sides import lightllm, openai, tokenizer

__all__ = ["lightllm", "openai", "tokenizer"]
