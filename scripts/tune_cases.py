"""The cases of tune.py: the contexts for which a model needs kernels, and calls that look like those of real steps."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from llmcore.api.protocols import AttnLimits
from llmcore.api.specs import DeviceInfo, OpContext, OpSpec
from llmcore.engine.blueprint import Blueprint, blueprint_at
from llmcore.layers import tensor_parallel
from llmcore.ops import DTYPES, attn_gqa_decode, drawing, packing, rope_angles, size
from llmcore.ops.attention import spec_of
from llmcore.ops.sample import plain_rows
from llmcore.registry.loader import load
from llmcore.registry.modes import Pins
from llmcore.registry.registry import Registry
from llmcore.registry.resolve import candidates_for
from llmcore_devtools.kernels.attention_cases import AttnCase, Uploads, case
from llmcore_devtools.kernels.attention_stored import stored
from llmcore_devtools.kernels.compare import as_packed, moved, tensors
from llmcore_devtools.kernels.write_stored import layout_of

Call = Callable[[], Any]
Kernel = Any

TOKENS: Mapping[int, tuple[int, ...]] = {0: (1,), 1: (8, 16), 2: (32, 64), 3: (128, 256), 4: (512, 2048)}
"""Token bucket -> the token counts with which ops are timed."""

COLD = 192 << 20
"""Bytes that calls read before they return to the same weights or KV: more than an L2 cache holds."""

MOST_COPIES, FEW_COPIES = 48, 8
"""Calls of one graph: over cold weights, and for data that was just written."""

WEIGHT_ONLY = ("linear.w4a16", "linear.w8a16", "linear.w4a16_silu_and_mul", "linear.w8a16_silu_and_mul")
EIGHT_BITS = ("linear.w8a8", "linear.fp8_block")
STACKS: Mapping[str, slice] = {
    **dict.fromkeys(("moe.experts.w4a16", "moe.experts.w8a16"), slice(1, 3)),
    **dict.fromkeys(("moe.fused.w4a16", "moe.fused.w8a16"), slice(3, 5)),
}
"""Op -> the arguments that are stacks of quantized weights: tuples of tensors."""

QUANTIZED_ROWS = ("quantize_rows", "rms_norm_quant", "add_rms_norm_quant", "silu_and_mul_quant")

HEAVY: Mapping[str, slice] = {
    **dict.fromkeys(("linear", "linear_silu_and_mul", "embedding", "head_linear"), slice(1, 2)),
    **dict.fromkeys(WEIGHT_ONLY, slice(1, 4)),
    **dict.fromkeys(EIGHT_BITS, slice(2, 4)),
    **{"moe.experts": slice(1, 2), "moe.fused": slice(3, 4)},
    **STACKS,
}
"""Op -> the arguments that come from memory."""

_FORM = re.compile(r"\.(w4a16|w8a16|w8a8|fp8_block)|_quant$")
_FORM_FIELDS = frozenset({"codes", "group", "scale", "scale_type", "zeros", "ordered"})
"""Parts of the name and of the shape that an op over quantized tensors has, and the plain op has not."""

MIXTURES = ("moe.route", "moe.dispatch", "moe.experts", "moe.combine", "moe.fused", *STACKS)
"""Ops whose own samples are like routes: tokens spread over the experts."""

SAMPLED = (
    *(*MIXTURES, "attn.merge", "attn.varlen", "head_linear", "latent_rope_kv_write"),
    *(*QUANTIZED_ROWS, *WEIGHT_ONLY, *EIGHT_BITS),
)
"""Ops that are called with their own samples."""

PROMPTS: Mapping[str, tuple[int, ...]] = {**dict.fromkeys(MIXTURES, (2048, 8192)), "attn.varlen": (1024, 4096)}
"""Tokens of the last bucket for ops that need other ones. Only this many give each of many experts a tile of matrix
products, and show the time of attention to one long prompt."""

Rows = tuple[Sequence[int], Sequence[int]]
"""(n_query, kv_len)."""


def _skewed(rows: int) -> tuple[int, ...]:
    return tuple(40 + 37 * row % 600 if row % 8 else 4000 + row for row in range(rows))


def _decode(*lengths: Sequence[int]) -> tuple[Rows, ...]:
    return tuple(((1,) * len(kv_len), kv_len) for kv_len in lengths)


def _beside(decode: int, prompt: int, prefix: int = 0) -> Rows:
    return (1,) * decode + (prompt,), (576,) * decode + (prefix + prompt,)


_KINDS: Mapping[str, Mapping[int, tuple[Rows, ...]]] = {
    "decode": {
        0: _decode((576,), (4096,)),
        1: _decode((576,) * 8, (8192,) * 16, _skewed(16)),
        2: _decode((576,) * 32, (576,) * 64, _skewed(64)),
        3: _decode((576,) * 128, (576,) * 256, _skewed(128)),
        4: _decode((576,) * 512),
    },
    "mixed": {
        0: (((1,), (576,)),),
        1: (_beside(8, 8), _beside(2, 14, 500)),
        2: (_beside(32, 32), _beside(16, 48, 500)),
        3: (_beside(64, 192), _beside(128, 128, 500)),
        4: (_beside(64, 448), _beside(200, 312, 1000)),
    },
    "prefill": {
        0: (((1,), (576,)),),
        1: (((16,), (16,)),),
        2: (((64,), (64,)), ((64,), (1064,))),
        3: (((256,), (256,)), ((100, 156), (100, 656))),
        4: (((512,), (512,)), ((2048,), (2048,)), ((512,) * 8, (512,) * 8), ((1024,), (5120,))),
    },
}
ATTENTION = {f"attn.{form}.{kind}": rows for form in ("gqa", "mla") for kind, rows in _KINDS.items()}
"""Rows per op and token bucket: the uniform lengths of benchmarks, long beside short, and long contexts."""

PLAIN = frozenset({*attn_gqa_decode.LAYOUTS, "mla-latent"})
"""The layouts in which attention cases are made. Entries of the table do not name them."""


def contexts(
    registry: Registry,
    model: Path,
    device: DeviceInfo,
    ops: Iterable[str],
    dtype: str,
    layout: str | None = None,
    modes: Sequence[str] = (),
    ranks: int = 1,
) -> list[OpContext]:
    """Returns the contexts that serving `model` needs, whatever kernels exist: composites, and the parts that they
    expand to.

    `layout`: a mode stores KV in it. Then these are the contexts of attention alone, because others stay the same.
    `ranks`: as `--tp`. `modes`: as `--mode`. Then these are the contexts that the model does not need without them.
    Raises ConfigError for modes that do not fit.
    """
    wanted, plan = set(ops), blueprint_at(model, registry, device, dtype)
    if ranks > 1:
        plan = replace(plan, mesh=tensor_parallel(0, ranks))
    if layout is not None:
        wanted &= ATTENTION.keys()
        plan = replace(plan, pins=Pins(layouts={group.layout: layout for group in plan.model.kv_groups}))
    found = _asked(registry, plan.pinned(modes) if modes else plan, wanted)
    known = _asked(registry, plan, wanted) if modes else {}
    return [context for key, context in found.items() if key not in known]


def _asked(registry: Registry, plan: Blueprint, wanted: set[str]) -> dict[tuple[object, ...], OpContext]:
    """Returns the contexts of a model, by what tells them apart."""
    known = {spec.name: spec for spec, _ in registry.specs(OpSpec)}
    asked, found = [resolution.context for resolution in plan.resolutions()], {}
    while asked:
        context = asked.pop(0)
        key = (context.op, context.bucket, context.layout, repr(sorted(context.shape.items())))
        if key in found:
            continue
        found[key] = context
        spec = known[context.op]
        if spec.expands_to:
            load(f"{spec.module}:expand")(context, partial(_record, asked, context, known))
    return {
        key: context
        for key, context in found.items()
        # pools of other layouts are made for attention alone
        if context.op in wanted and (context.op in ATTENTION or context.layout in (None, *PLAIN))
    }


def _record(asked: list[OpContext], whole: OpContext, known: Mapping[str, OpSpec], op: str, **shape: Any) -> Call:
    if op in known:
        asked.append(replace(whole, op=op, shape=shape))
    return lambda *args: None


def plain_of(registry: Registry, context: OpContext) -> OpContext | None:
    """Returns the context of the op over plain tensors of the same shape, or None if `context` is such a one."""
    op = _FORM.sub("", context.op)
    if op == context.op or not any(spec.name == op for spec, _ in registry.specs(OpSpec)):
        return None
    shape = {name: value for name, value in context.shape.items() if name not in _FORM_FIELDS}
    return replace(context, op=op, shape=shape)


def kernels_of(registry: Registry, op: str) -> list[Any]:
    """Returns the KernelSpecs that have a cost."""
    return [spec for spec, _ in candidates_for(registry, op) if spec.cost is not None]


class Workload:
    """One context's cases, and how a kernel is called on each. Tensors are on `device`.

    Attention over a layout of a plugin in `registry` gets a pool of that layout.
    """

    def __init__(
        self, registry: Registry, context: OpContext, device: torch.device, counts: Sequence[int] | None = None
    ) -> None:
        self.context, self.device, self._registry = context, device, registry
        self.attention = context.op in ATTENTION
        if self.attention:
            rows = ATTENTION[context.op][context.bucket]
            cases = rows if counts is None else [((n,), (n,)) for n in counts]
            with drawing(1, device):
                made = [case(context, *lengths) for lengths in cases]
            if context.op.startswith("attn.mla."):
                made = [one.joined() for one in made]
            if context.layout not in PLAIN:
                spec = spec_of(context)
                layout = layout_of(registry, context, spec.kv_heads, spec.key_size, spec.value_size)
                made = [stored(one, layout) for one in made]
            self.samples: list[tuple[Any, ...]] = [(one,) for one in made]
        else:
            usual = TOKENS[context.bucket]
            if context.bucket == max(TOKENS):
                usual = PROMPTS.get(context.op, usual)
            self.samples = [_arguments(registry, context, tokens, device) for tokens in counts or usual]
        self._rotated: list[list[Any]] | None = None

    def calls(self, kernel: Kernel, cold: bool = True) -> Iterator[list[Call]]:
        """Yields for each case the calls of one graph, over buffers that are as `cold` as in a step. Else it yields
        one call."""
        if cold and self._rotated is None:
            self._rotated = [self._rotations(sample) for sample in self.samples]
        buffers = self._rotated if cold and self._rotated is not None else [[s] for s in self.samples]
        if self.attention:
            limits = AttnLimits(
                rows=max(len(c.rows.n_query) for (c,) in self.samples),
                tokens=max(len(c.q) for (c,) in self.samples),
                kv_len=max(int(c.rows.kv_len.max()) for (c,) in self.samples),
            )
            kernel.workspace(limits)
        for rotated in buffers:
            if self.attention:
                yield _attention_calls(kernel, rotated)
            else:
                yield [partial(kernel, *packed(self._registry, kernel, self.context, args)) for args in rotated]

    def _rotations(self, sample: tuple[Any, ...]) -> list[Any]:
        if self.attention:
            (one,) = sample
            copies = _copies(sum(pool[0].nbytes for pool in one.kv) * int(one.rows.kv_len.sum()))
            return [sample, *((replace(one, kv=_cloned(one.kv)),) for _ in range(copies - 1))]
        heavy = HEAVY.get(self.context.op)
        copies = FEW_COPIES if heavy is None else _copies(sum(part.nbytes for part in tensors(sample[heavy])))
        return [sample, *(_cloned(sample) for _ in range(copies - 1))]


def _attention_calls(kernel: Kernel, rotated: Sequence[tuple[AttnCase]]) -> list[Call]:
    one: AttnCase = rotated[0][0]
    meta, out = dict(one.meta), one.out()
    kernel.plan(one.rows, Uploads(meta))
    return [partial(kernel.run, c.q, c.k_new, c.v_new, c.kv, meta, out) for (c,) in rotated]


def packed(registry: Registry, kernel: Kernel, context: OpContext, sample: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns a sample with its weights in the form in which serving gives them to `kernel`."""
    where = STACKS.get(context.op)
    if where is None or packing([kernel]) is None:
        return as_packed(kernel, import_module(registry.find(OpSpec, context.op).module), context, sample)
    stacks = (kernel.pack(*stack)[: len(stack)] for stack in sample[where])
    return *sample[: where.start], *stacks, *sample[where.stop :]


def _copies(used: int) -> int:
    return max(4, min(MOST_COPIES, -(-COLD // max(used, 1))))


def _cloned(sample: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        item.clone() if isinstance(item, torch.Tensor) else _cloned(item) if isinstance(item, tuple) else item
        for item in sample
    )


# --- arguments of each op --------------------------------------------------------------------------------------


def _arguments(registry: Registry, context: OpContext, tokens: int, device: torch.device) -> tuple[Any, ...]:
    if context.op in SAMPLED:
        module = import_module(registry.find(OpSpec, context.op).module)
        with drawing(1, device, tokens):
            own = module.timed(context, tokens) if hasattr(module, "timed") else module.samples(context)
            # some samples are made on the CPU, whatever device draws
            return moved(next(iter(own)), device)
    if context.op not in _ARGUMENTS:
        raise SystemExit(f"tune.py has no arguments for {context.op}; it has {', '.join(sorted(TUNABLE))}")

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=torch.float32).to(DTYPES[context.dtype])

    return _ARGUMENTS[context.op](context, tokens, draw)


Draw = Callable[..., torch.Tensor]


def _linear(context: OpContext, tokens: int, draw: Draw) -> tuple[Any, ...]:
    inputs = size(context.shape, "inputs")
    rows = size(context.shape, "outputs") if context.op == "linear" else 2 * size(context.shape, "size")
    return draw(tokens, inputs), draw(rows, inputs) / 64, draw(rows) if context.shape.get("bias") else None


def _rms_norm(context: OpContext, tokens: int, draw: Draw) -> tuple[Any, ...]:
    width = size(context.shape, "size")
    return draw(tokens, width), draw(width), 1e-5


def _add_rms_norm(context: OpContext, tokens: int, draw: Draw) -> tuple[Any, ...]:
    width = size(context.shape, "size")
    return draw(tokens, width), draw(tokens, width), draw(width), 1e-5


def _layer_norm(context: OpContext, tokens: int, draw: Draw) -> tuple[Any, ...]:
    own = (size(context.shape, "heads"),) if context.shape.get("heads") else ()
    width = size(context.shape, "size")
    bias = draw(*own, width) if context.shape.get("bias") else None
    return draw(tokens, *own, width), draw(*own, width), bias, 1e-5


def _add_layer_norm(context: OpContext, tokens: int, draw: Draw) -> tuple[Any, ...]:
    x, *rest = _layer_norm(context, tokens, draw)
    return x, draw(*x.shape), *rest


def _gelu_tanh(context: OpContext, tokens: int, draw: Draw) -> tuple[Any, ...]:
    return (draw(tokens, size(context.shape, "size")),)


def _gated(context: OpContext, tokens: int, draw: Draw) -> tuple[Any, ...]:
    return (draw(tokens, 2 * size(context.shape, "size")),)


def _embedding(context: OpContext, tokens: int, draw: Draw) -> tuple[Any, ...]:
    table = draw(size(context.shape, "vocab"), size(context.shape, "size"))
    return torch.randint(len(table), (tokens,), device=table.device), table


def _rope_kv_write(context: OpContext, tokens: int, draw: Draw) -> tuple[Any, ...]:
    """Queries, keys and values are parts of one tensor, as a projection leaves them."""
    heads, kv_heads, width = (size(context.shape, name) for name in ("heads", "kv_heads", "size"))
    joined = draw(tokens, (heads + 2 * kv_heads) * width)
    border = (heads + kv_heads) * width
    qk, v = joined[:, :border].view(tokens, -1, width), joined[:, border:].view(tokens, kv_heads, width)
    half = size(context.shape, "rotated") // 2
    frequencies = 1e4 ** -(torch.arange(half, device=qk.device) / half)
    cos, sin = rope_angles.reference(torch.arange(tokens, device=qk.device), frequencies, 1.0)
    pool = draw(8 * tokens + 1, kv_heads, width)
    slots = torch.randperm(len(pool), device=pool.device)[:tokens]
    return qk, v, cos, sin, (pool, pool.clone()), slots


def _sample(context: OpContext, tokens: int, draw: Draw) -> tuple[Any, ...]:
    logits = draw(tokens, size(context.shape, "vocab")) * 3
    variant = context.shape["variant"]
    columns = {} if variant in ("greedy", "temperature") else {"top_p": 0.9, "top_k": 50}
    rows = plain_rows(tokens, temperature=0.0 if variant == "greedy" else 0.8, **columns)
    return logits, rows.to(logits.device)


_ARGUMENTS: Mapping[str, Callable[[OpContext, int, Draw], tuple[Any, ...]]] = {
    "linear": _linear,
    "linear_silu_and_mul": _linear,
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "layer_norm": _layer_norm,
    "add_layer_norm": _add_layer_norm,
    "silu_and_mul": _gated,
    "gelu_and_mul": _gated,
    "gelu_tanh": _gelu_tanh,
    "embedding": _embedding,
    "rope_kv_write": _rope_kv_write,
    "sample": _sample,
}

TUNABLE = (*_ARGUMENTS, *SAMPLED, *ATTENTION)
"""The ops for which calls can be made."""
