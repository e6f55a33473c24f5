"""Shapes of ops in common decoders, for checks on a device. The names are those of `layers`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

from llmcore.api.models import AttnSpec, RouteSpec
from llmcore.ops import Shape
from llmcore.ops.attention import shape_of
from llmcore.ops.moe import shape_of as route_shape
from llmcore.ops.sample import VARIANTS


class Sizes(NamedTuple):
    """One decoder's sizes, in elements. `bias`: the first linear of its attention has a bias."""

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
"""Groups of 4, 3 and 7 query heads; sizes that large powers of two divide, and odd sizes."""

MORE_ATTENTION = (
    AttnSpec(heads=10, kv_heads=10, key_size=80, value_size=80, scale=80**-0.5),
    AttnSpec(heads=8, kv_heads=8, key_size=96, value_size=96, scale=96**-0.5, window=1500),
    AttnSpec(heads=8, kv_heads=4, key_size=256, value_size=256, scale=1 / 16, soft_cap=50.0),
    AttnSpec(heads=40, kv_heads=8, key_size=128, value_size=128, scale=128**-0.5),
)
"""One query head per KV head, other sizes of heads, a window, a soft cap, groups of 5."""


class Latent(NamedTuple):
    """Sizes of latent attention, in elements: a head's part without rope and with rope, the values, the latent."""

    heads: int
    plain: int = 128
    rotated: int = 64
    value: int = 128
    latent: int = 512

    @property
    def absorbed(self) -> AttnSpec:
        """Its attention over latent rows."""
        key = self.latent + self.rotated
        return AttnSpec(heads=self.heads, kv_heads=1, key_size=key, value_size=self.latent, scale=192**-0.5)

    def expanded(self, mask: str) -> AttnSpec:
        """Its attention over keys and values of every head."""
        heads, key = self.heads, self.plain + self.rotated
        return AttnSpec(heads=heads, kv_heads=heads, key_size=key, value_size=self.value, scale=key**-0.5, mask=mask)


LATENT = (Latent(16), Latent(128))
"""One tile of query heads, and many tiles."""


class Mixture(NamedTuple):
    """A mixture of experts: hidden size, width of an expert, routing, and width of the shared experts."""

    hidden: int
    inner: int
    route: RouteSpec
    bias: bool = False
    shared: int = 0

    @property
    def shape(self) -> Shape:
        """The shape of the op moe.fused."""
        sizes = {"size": self.hidden, "inner": self.inner, "shared": self.shared}
        return {**route_shape(self.route), "bias": self.bias, **sizes}


MIXTURES = (
    Mixture(2048, 1408, RouteSpec(experts=64, top_k=6), shared=2816),
    Mixture(2048, 768, RouteSpec(experts=128, top_k=8, normalize=True)),
    Mixture(1024, 1792, RouteSpec(experts=8, top_k=2, normalize=True)),
)
"""Many narrow experts, and few wide ones."""

ROUTES = (
    *MIXTURES,
    Mixture(
        7168,
        2048,
        RouteSpec(
            experts=256,
            top_k=8,
            scoring="sigmoid",
            normalize=True,
            scale=2.5,
            groups=8,
            top_groups=4,
            group_score="top2",
        ),
        bias=True,
    ),
)
"""Routers. The last has groups and a correction; its experts would fill the memory."""


def _linears(d: Sizes) -> tuple[Shape, ...]:
    """The linears of a layer, the head, a linear with unaligned rows, and one with a single output."""
    wide = d.heads * d.head
    sizes = (
        (d.hidden, wide + 2 * d.kv_heads * d.head, d.bias),
        (wide, d.hidden, False),
        (d.hidden, 2 * d.inner, False),
        (d.inner, d.hidden, False),
        (d.hidden, d.vocab, False),
        (d.hidden, d.head + 3, d.bias),
        (d.hidden, 1, False),
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
    "gelu_and_mul": lambda d: ({"size": d.inner},),
    "gelu_tanh": lambda d: ({"size": d.inner},),
    "rope": lambda d: ({"heads": d.heads + d.kv_heads, "size": d.head, "rotated": d.head},),
    "rope_angles": lambda d: ({"rotated": d.head},),
    "rope_kv_write": lambda d: ({"heads": d.heads, "kv_heads": d.kv_heads, "size": d.head, "rotated": d.head},),
    "qk_norm_rope_kv_write": lambda d: _BY_OP["rope_kv_write"](d),
    "sample": lambda d: tuple({"variant": variant, "vocab": d.vocab} for variant in VARIANTS),
    **dict.fromkeys(("sample.best", "sample.part", "sample.pick"), lambda d: ({"vocab": d.vocab, "ranks": 2},)),
    "attn.merge": lambda d: ({"heads": d.heads, "value_size": d.head},),
}

_U4: Shape = {"codes": "u4", "group": 128, "scale": "f16", "zeros": True, "ordered": False}
_I8: Shape = {"codes": "i8", "group": 0, "scale": "f32", "zeros": False, "ordered": False}
_E4M3: Shape = {**_I8, "codes": "e4m3"}
_BLOCKS: Shape = {**_E4M3, "group": 128}
_WEIGHTS: Mapping[str, tuple[Shape, ...]] = {
    "linear.w4a16": (_U4, {**_U4, "group": 64, "scale": "bf16", "zeros": False}),
    "linear.w8a16": (_I8, _BLOCKS),
    "linear.w8a8": (_I8, _E4M3),
    "linear.fp8_block": (_BLOCKS,),
}
"""Op -> how its weights are quantized, in the words of plugin-quantization."""

_ROW_FORMS: tuple[Shape, ...] = tuple(
    {name: form[name] for name in ("codes", "group")} for form in (_I8, _E4M3, _BLOCKS)
)

_ROWS: Mapping[str, Callable[[Sizes], tuple[Shape, ...]]] = {
    "quantize_rows": lambda d: tuple({"size": size, "static": False} for size in (d.hidden, d.inner)),
    "rms_norm_quant": lambda d: _BY_OP["add_rms_norm"](d),
    "add_rms_norm_quant": lambda d: _BY_OP["add_rms_norm"](d),
    "silu_and_mul_quant": lambda d: _BY_OP["silu_and_mul"](d),
}
"""Op that writes quantized rows -> the shapes of the rows."""


def _quantized(op: str, d: Sizes) -> Iterator[Shape]:
    """The shapes of an op over quantized weights or rows, with groups that divide its rows."""
    name, gated, _ = op.partition("_silu_and_mul")
    if op in _ROWS:
        shapes, forms = _ROWS[op](d), _ROW_FORMS
    elif gated:
        shapes, forms = tuple({**shape, "bias": False} for shape in _BY_OP["linear_silu_and_mul"](d)), _WEIGHTS[name]
    else:
        shapes, forms = _linears(d)[:4], _WEIGHTS[name]
    for shape in shapes:
        for form in forms:
            if int(shape.get("inputs") or shape["size"] or 0) % int(form["group"] or 1) == 0:
                yield {**shape, **form}


def _without(shape: Shape, *names: str) -> Shape:
    return {name: value for name, value in shape.items() if name not in names}


def _only(shape: Shape, *names: str) -> Shape:
    return {name: shape[name] for name in names}


def _heads(n: Latent) -> tuple[Shape, ...]:
    """The up-projections of keys, onto queries, and of values."""
    sizes = ((n.plain, n.latent), (n.latent, n.value))
    return tuple({"heads": n.heads, "inputs": inputs, "outputs": outputs} for inputs, outputs in sizes)


_OTHERS: Mapping[str, tuple[Shape, ...]] = {
    **{f"attn.mla.{kind}": tuple(shape_of(n.absorbed) for n in LATENT) for kind in ("decode", "prefill", "mixed")},
    "attn.varlen": tuple(shape_of(n.expanded(mask)) for n in LATENT[:1] for mask in ("causal", "full")),
    "head_linear": tuple(shape for n in LATENT for shape in _heads(n)),
    "latent_rope_kv_write": tuple(
        {"heads": n.heads, "size": n.plain + n.rotated, "latent": n.latent, "rotated": n.rotated} for n in LATENT
    ),
    "moe.route": tuple(_without(m.shape, "inner", "shared") for m in ROUTES),
    "moe.dispatch": tuple(_only(m.shape, "experts", "top_k") for m in ROUTES),
    "moe.experts": tuple(_only(m.shape, "experts", "top_k", "size", "inner") for m in MIXTURES),
    "moe.combine": tuple(_only(m.shape, "top_k", "size") for m in ROUTES),
    "moe.fused": tuple(m.shape for m in MIXTURES),
    **{
        f"moe.{op}.{name}": tuple(
            {**shape, **_without(form, "scale", "ordered"), "scale_type": form["scale"]} for shape in shapes
        )
        for name, form in (("w4a16", _U4), ("w8a16", _BLOCKS))
        for op, shapes in (
            ("experts", tuple(_only(m.shape, "experts", "top_k", "size", "inner") for m in MIXTURES)),
            ("fused", tuple(m.shape for m in MIXTURES)),
        )
    },
}
"""Shapes of ops that only some decoders use."""


def real_shapes(op: str) -> tuple[Shape, ...]:
    """The shapes of `op`; () if none of these decoders uses it."""
    if op in _OTHERS:
        return _OTHERS[op]
    if op.startswith("attn.gqa."):
        return tuple(shape_of(spec) for spec in (*(d.spec for d in DECODERS), *MORE_ATTENTION))
    shapes: Callable[[Sizes], Iterable[Shape]] | None
    shapes = partial(_quantized, op) if op in _ROWS or op.removesuffix("_silu_and_mul") in _WEIGHTS else _BY_OP.get(op)
    found = [shape for d in DECODERS for shape in shapes(d)] if shapes else []
    return tuple(shape for index, shape in enumerate(found) if shape not in found[:index])
