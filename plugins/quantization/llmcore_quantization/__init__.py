"""Quantized weights and KV: readers of checkpoints, methods that quantize at load, ops, and KV layouts."""
