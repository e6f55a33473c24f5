"""quantize_rows: the inputs of a linear as codes of 8 bits, with a scale for each row or each group of a row.

The largest magnitude of a row or group becomes 127 (int8) or 448 (float8 e4m3). With `static` in the shape, every row
has the scale of the checkpoint instead, and values beyond its range become the last code.
"""

from __future__ import annotations

import torch
from llmcore.api import OpContext
from llmcore.ops import SAMPLE_TOKENS, Op, Shape, draw, draws_on, size

from llmcore_quantization.canonical import CODES
from llmcore_quantization.ops import LONG, ROUNDED, Rows, Samples, distance, in_forms, uneven
from llmcore_quantization.rounding import codes_of

TOLERANCE = ROUNDED

SHAPES: tuple[Shape, ...] = (
    *({**shape, "static": False} for shape in in_forms(40, 256)),
    *({"size": 40, "codes": codes, "group": 0, "static": True} for codes in ("i8", "e4m3")),
)

compared = distance


def make(context: OpContext) -> Op:
    """x [T, size], input_scale [1] f32 or None -> (codes [T, size], scale [T, size / group] f32)."""
    kind, group = CODES[str(context.shape["codes"])], size(context.shape, "group")

    def run(x: torch.Tensor, input_scale: torch.Tensor | None = None) -> Rows:
        return codes_of(x, kind, group, input_scale)

    return run


def samples(context: OpContext) -> Samples:
    """Rows with an outlier, which exceeds a static scale, and a row of zeros."""
    for tokens in SAMPLE_TOKENS[context.bucket]:
        yield uneven(draw(context, tokens, size(context.shape, "size"))), _input_scale(context)


def long_samples(context: OpContext) -> Samples:
    """A token count near the upper end of the bucket."""
    yield draw(context, LONG.get(context.bucket, 4096), size(context.shape, "size")), _input_scale(context)


def cost(shape: Shape) -> tuple[float, float]:
    """A read, a write of a byte, and four operations per element."""
    elements = size(shape, "tokens") * size(shape, "size")
    return elements * (size(shape, "element", 2) + 1.0), 4.0 * elements


def _input_scale(context: OpContext) -> torch.Tensor | None:
    return torch.full((1,), 0.03, device=draws_on()) if context.shape["static"] else None
