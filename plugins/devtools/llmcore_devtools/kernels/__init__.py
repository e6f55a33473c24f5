"""Kernels beside their references: checked, compared and timed on a device."""
