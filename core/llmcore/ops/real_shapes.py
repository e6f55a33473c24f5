"""Shapes that decoders in use ask ops for, for checks on a device; names as `layers` passes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from llmcore.ops import Shape
from llmcore.ops.attention import shape_of
from llmcore.ops.sample import VARIANTS
from llmcore.specs import AttnSpec


class Sizes(NamedTuple):
    """One decoder's sizes, in elements; `bias`: of its first linear of attention."""

    hidden: int
    heads: int
    kv_heads: int
    head: int
    inner: int
    vocab: int
    bias: bool = False

    @property
    def spec(self) -> AttnSpec:
        """Its attention."""
        head = self.head
        return AttnSpec(heads=self.heads, kv_heads=self.kv_heads, key_size=head, value_size=head, scale=head**-0.5)


DECODERS = (
    Sizes(4096, 32, 8, 128, 14336, 128256),
    Sizes(576, 9, 3, 64, 1536, 49152),
    Sizes(3584, 28, 4, 128, 18944, 152064, bias=True),
)
"""Groups of 4, 3 and 7 query heads; sizes that powers of two divide, and odd ones."""

MORE_ATTENTION = (
    AttnSpec(heads=10, kv_heads=10, key_size=80, value_size=80, scale=80**-0.5),
    AttnSpec(heads=8, kv_heads=8, key_size=96, value_size=96, scale=96**-0.5, window=1500),
    AttnSpec(heads=8, kv_heads=4, key_size=256, value_size=256, scale=1 / 16, soft_cap=50.0),
    AttnSpec(heads=40, kv_heads=8, key_size=128, value_size=128, scale=128**-0.5),
)
"""One query head per KV head, other sizes of heads, a window, a soft cap, groups of 5."""


def _linears(d: Sizes) -> tuple[Shape, ...]:
    wide = d.heads * d.head
    sizes = (
        (d.hidden, wide + 2 * d.kv_heads * d.head, d.bias),
        (wide, d.hidden, False),
        (d.hidden, 2 * d.inner, False),
        (d.inner, d.hidden, False),
        (d.hidden, d.vocab, False),
    )
    return tuple({"inputs": inputs, "outputs": outputs, "bias": bias} for inputs, outputs, bias in sizes)


_BY_OP: Mapping[str, Callable[[Sizes], tuple[Shape, ...]]] = {
    "linear": _linears,
    "linear_silu_and_mul": lambda d: ({"inputs": d.hidden, "size": d.inner},),
    "embedding": lambda d: ({"vocab": d.vocab, "size": d.hidden},),
    "rms_norm": lambda d: ({"size": d.hidden}, {"size": d.head}),
    "add_rms_norm": lambda d: ({"size": d.hidden},),
    "layer_norm": lambda d: ({"size": d.hidden, "bias": True}, {"size": d.head, "heads": d.heads, "bias": False}),
    "add_layer_norm": lambda d: ({"size": d.hidden, "bias": True},),
    "silu_and_mul": lambda d: ({"size": d.inner},),
    "gelu_tanh": lambda d: ({"size": d.inner},),
    "rope": lambda d: ({"heads": d.heads + d.kv_heads, "size": d.head, "rotated": d.head},),
    "rope_angles": lambda d: ({"rotated": d.head},),
    "rope_kv_write": lambda d: ({"heads": d.heads, "kv_heads": d.kv_heads, "size": d.head, "rotated": d.head},),
    "qk_norm_rope_kv_write": lambda d: _BY_OP["rope_kv_write"](d),
    "sample": lambda d: tuple({"variant": variant, "vocab": d.vocab} for variant in VARIANTS),
    "attn.merge": lambda d: ({"heads": d.heads, "value_size": d.head},),
}


def real_shapes(op: str) -> tuple[Shape, ...]:
    """What `op` is asked for; nothing where no decoder here uses it."""
    if op.startswith("attn.gqa."):
        return tuple(shape_of(spec) for spec in (*(d.spec for d in DECODERS), *MORE_ATTENTION))
    shapes = _BY_OP.get(op)
    found = [shape for d in DECODERS for shape in shapes(d)] if shapes else []
    return tuple(shape for index, shape in enumerate(found) if shape not in found[:index])
