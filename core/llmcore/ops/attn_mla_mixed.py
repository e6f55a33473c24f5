"""attn.mla.mixed: latent attention of all rows of a captured step, absorbed; see llmcore.ops.mla."""

from llmcore.ops.attention import TOLERANCE
from llmcore.ops.attention import ReferenceAttention as make
from llmcore.ops.attn_gqa_mixed import long_samples, samples, timed
from llmcore.ops.mla import LAYOUTS, SHAPES, cost

__all__ = ["LAYOUTS", "SHAPES", "TOLERANCE", "cost", "long_samples", "make", "samples", "timed"]
