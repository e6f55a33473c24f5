"""GGUF checkpoints."""
