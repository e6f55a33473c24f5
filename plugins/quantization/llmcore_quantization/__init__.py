"""Quantized weights and KV: readers of checkpoints, methods that quantize at load, ops, and KV layouts."""

from llmcore.api import hookimpl


@hookimpl
def register_ops():
    return ()
