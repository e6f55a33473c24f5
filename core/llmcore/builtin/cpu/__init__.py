"""Implementations of the CPU kernels."""
