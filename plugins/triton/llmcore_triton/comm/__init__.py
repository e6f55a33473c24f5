"""Kernels over several ranks: through memory that GPUs of one host write for each other, and through NCCL."""
