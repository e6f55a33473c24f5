"""The Llama family."""
