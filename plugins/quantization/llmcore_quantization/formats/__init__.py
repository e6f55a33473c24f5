"""Readers: one file per checkpoint format, from its tensors to `canonical` ones."""
