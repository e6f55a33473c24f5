"""Kernels for mixtures of experts: one op per module."""
