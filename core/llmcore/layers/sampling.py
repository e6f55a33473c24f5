"""Op `sample` for those who write a kernel for it: its types, its reference and its random numbers."""

from llmcore.ops.philox import GUMBEL_MAX, GUMBEL_MIN, gumbel, philox4x32, token_bits
from llmcore.ops.sample import (
    VARIANTS,
    Adjust,
    Sampled,
    Sampler,
    SampleRows,
    adjusted,
    plain_rows,
    reference,
    with_logprobs,
)

__all__ = [
    "GUMBEL_MAX",
    "GUMBEL_MIN",
    "VARIANTS",
    "Adjust",
    "SampleRows",
    "Sampled",
    "Sampler",
    "adjusted",
    "gumbel",
    "philox4x32",
    "plain_rows",
    "reference",
    "token_bits",
    "with_logprobs",
]
