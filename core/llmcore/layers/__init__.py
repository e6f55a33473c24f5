"""Public building blocks of model families."""
