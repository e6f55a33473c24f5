"""attn.mla.prefill: latent attention of rows with any number of query tokens, absorbed; see llmcore.ops.mla.

For long prompts the expanded form is cheaper (attn.varlen over keys and values of every head). The layer chooses.
"""

from llmcore.ops.attention import TOLERANCE
from llmcore.ops.attention import ReferenceAttention as make
from llmcore.ops.attn_gqa_prefill import long_samples, samples, timed
from llmcore.ops.mla import LAYOUTS, SHAPES, cost

__all__ = ["LAYOUTS", "SHAPES", "TOLERANCE", "cost", "long_samples", "make", "samples", "timed"]
