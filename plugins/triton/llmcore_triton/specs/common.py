"""The requirements that the kernels share."""

from llmcore.api import Requires

CAPABILITY = (80, 129)
"""Ampere to Blackwell: GPUs with bf16 and asynchronous copies."""

GPU = Requires(device="cuda", capability=CAPABILITY)
