"""Tokens to text and back: tokenizers, chat templates, the detokenizer, stop strings. No torch."""
