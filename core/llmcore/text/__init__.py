"""Text to tokens and back: tokenizers, chat templates, the detokenizer, stop strings, output parsers. No torch."""
