"""What the kernels have in common."""

from llmcore.api import Requires

CAPABILITY = (80, 129)
"""Ampere to Blackwell: what has bf16 and asynchronous copies."""

GPU = Requires(device="cuda", capability=CAPABILITY)
