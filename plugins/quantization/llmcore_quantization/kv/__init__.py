"""KV layouts that quantize."""
