"""Kernels for quantized weights and inputs. Their ops are plugin-quantization's."""
