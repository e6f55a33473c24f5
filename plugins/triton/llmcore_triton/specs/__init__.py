"""The specs of the kernels, without torch and triton: a module per kind of op."""

from llmcore.api import OpContext, Requires

CAPABILITY = (80, 129)
"""Ampere to Blackwell: GPUs with bf16 and asynchronous copies."""

GPU = Requires(device="cuda", capability=CAPABILITY)
"""The requirements that most kernels share."""

COST = "llmcore_triton.tuned:microseconds"
"""The cost of a kernel: what was measured for it, by its name."""

CUBLAS_COST = "llmcore_triton.linear_cublas:cost"


def other_than_deterministic(context: OpContext) -> str | None:
    """Returns why a slow kernel with the same bits in every batch is not for `context`, or None."""
    return None if context.deterministic else "is for --deterministic; others are faster"
