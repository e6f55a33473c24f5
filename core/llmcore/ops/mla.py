"""What the attn.mla ops share: multi-head latent attention in its absorbed form (arXiv:2405.04434, section 2.1).

A token's KV is one row: the normed latent, `value_size` elements, and then the rotated part of its key. Queries are
absorbed, that is, already multiplied by the keys' up-projection, so every query head attends to the same row (one KV
head) and the values are the row's latent; the values' up-projection follows outside.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from llmcore.models import AttnSpec
from llmcore.ops import Shape, size
from llmcore.ops.attention import shape_of
from llmcore.ops.attention_cases import AttnCase
from llmcore.specs import OpContext

LAYOUTS = ("mla-latent",)

SHAPES: tuple[Shape, ...] = tuple(
    shape_of(spec)
    for spec in (
        AttnSpec(heads=6, kv_heads=1, key_size=24, value_size=16, scale=0.2),
        AttnSpec(heads=16, kv_heads=1, key_size=48, value_size=32, scale=0.15),
        AttnSpec(heads=3, kv_heads=1, key_size=40, value_size=32, scale=0.3),
    )
)
"""Few heads and a tile of them; rotated parts of 8 and 16."""


def with_spec(context: OpContext) -> OpContext:
    """`context` with the layout, and with a small AttnSpec where it has none."""
    return replace(context, layout=context.layout or LAYOUTS[0], shape=context.shape or SHAPES[0])


def cost(shape: Shape) -> tuple[float, float]:
    """Rows of `kv_len` tokens are read once for `tokens` queries."""
    kv_len, tokens, heads = size(shape, "kv_len"), size(shape, "tokens"), size(shape, "heads")
    key, value = size(shape, "key_size"), size(shape, "value_size")
    moved = kv_len * key + tokens * heads * (key + value)
    return float(moved * size(shape, "element", 2)), 2.0 * tokens * kv_len * heads * (key + value)


def apart(case: AttnCase) -> AttnCase:
    """Queries as a view with other elements between its rows, as when they are a part of a wider tensor."""
    wide = case.q.new_full((*case.q.shape[:2], case.q.shape[2] + 8), float("nan"))
    wide[..., : case.q.shape[2]] = case.q
    return replace(case, q=wide[..., : case.q.shape[2]])


def cases(cases: Iterator[AttnCase]) -> Iterator[tuple[AttnCase]]:
    """As samples: each as it is, and the last with `apart` queries."""
    case = None
    for case in cases:
        yield (case,)
    if case is not None:
        yield (apart(case),)
