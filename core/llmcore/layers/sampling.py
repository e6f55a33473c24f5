"""Op `sample`, for authors of kernels: its types, its reference and its random numbers."""

from llmcore.ops.philox import bits, gumbel, philox4x32
from llmcore.ops.sample import (
    BLOCK,
    LONGEST_RISE,
    VARIANTS,
    Adjust,
    Masks,
    Rises,
    Sampled,
    Sampler,
    SampleRows,
    adjusted,
    masked,
    noise,
    plain_rows,
    reference,
    with_logprobs,
)

__all__ = [
    "BLOCK",
    "LONGEST_RISE",
    "VARIANTS",
    "Adjust",
    "Masks",
    "Rises",
    "SampleRows",
    "Sampled",
    "Sampler",
    "adjusted",
    "bits",
    "gumbel",
    "masked",
    "noise",
    "philox4x32",
    "plain_rows",
    "reference",
    "with_logprobs",
]
