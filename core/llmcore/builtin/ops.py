"""The ops of a dense decoder."""

from collections.abc import Iterable

from llmcore.api import OpSpec, hookimpl

_OPS: dict[str, tuple[str, tuple[str, ...]]] = {
    "embedding": ("(ids [T], table [vocabulary, size]) -> [T, size]", ()),
    "linear": (
        "(x [T, inputs], weight [outputs, inputs], bias [outputs] | None, residual [T, outputs] | None = None) "
        "-> [T, outputs]",
        (),
    ),
    "rms_norm": ("(x [..., size], weight [size], of the type of x or f32, eps) -> [..., size]", ()),
    "add_rms_norm": ("(x [T, size], residual [T, size], weight [size], eps) -> (normed sum, sum)", ("rms_norm",)),
    "layer_norm": (
        "(x [..., size], weight [size] or, for x [T, heads, size], [heads, size], bias like weight | None, eps) "
        "-> [..., size]",
        (),
    ),
    "add_layer_norm": (
        "(x [T, size], residual [T, size], weight [size], bias [size] | None, eps) -> (normed sum, sum)",
        ("layer_norm",),
    ),
    "silu_and_mul": ("(x [T, 2 size]) -> [T, size]", ()),
    "gelu_tanh": ("(x [T, size]) -> [T, size]", ()),
    "gelu_and_mul": ("(x [T, 2 size]) -> [T, size]", ()),
    "linear_silu_and_mul": (
        "(x [T, inputs], weight [2 size, inputs], bias [2 size] | None) -> [T, size]",
        ("linear", "silu_and_mul"),
    ),
    "rope": ("(x [T, heads, size], cos [T, rotated], sin [T, rotated]) -> [T, heads, size]", ()),
    "rope_kv_write": (
        "(qk [T, heads + kv_heads, size], v [T, kv_heads, value_size], cos, sin, kv, slots [T]) -> rotated qk",
        ("rope",),
    ),
    "qk_norm_rope_kv_write": (
        "(qk, v, norms: weights [size] of q and k, eps, cos, sin, kv, slots), as rope_kv_write -> normed, rotated qk",
        ("rms_norm", "rope_kv_write"),
    ),
    "attn.gqa.decode": ("an AttentionKernel for rows of one query token", ()),
    "attn.gqa.prefill": ("an AttentionKernel for rows of any number of query tokens", ()),
    "attn.gqa.mixed": ("an AttentionKernel for all rows of a captured step", ()),
    "attn.varlen": (
        "(q [T, heads, key_size], k [L, kv_heads, key_size], v [L, kv_heads, value_size], q_start [R + 1], "
        "k_start [R + 1], (longest q, longest k)) -> (out [T, heads, value_size], lse [T, heads])",
        (),
    ),
    "moe.route": (
        "(x [T, size], weight [experts, size], bias [experts] | None) -> (weights [T, top_k], experts [T, top_k])",
        (),
    ),
    "moe.dispatch": ("(x [T, size], experts [T, top_k]) -> Dispatched(x, pairs [T top_k], starts [experts + 1])", ()),
    "moe.experts": (
        "(Dispatched, gate_up [experts, 2 inner, size], down [experts, size, inner], into [T top_k, size] | None) -> "
        "[T top_k, size]",
        (),
    ),
    "moe.combine": ("(y [T top_k, size], weights [T, top_k], extra [T, size] | None) -> [T, size]", ()),
    "moe.fused": (
        "(x [T, size], router, bias | None, gate_up, down, extra [T, size] | None, shared (gate_up, down) | None) -> "
        "[T, size]",
        ("moe.route", "moe.dispatch", "moe.experts", "moe.combine", "linear_silu_and_mul", "linear"),
    ),
    "sample": ("(logits [S, vocabulary] of any float type, rows: SampleRows) -> Sampled", ()),
    "sample.best": ("(logits [S, N] of any float type, first token) -> [S, 2] f32: best score, token", ()),
    "sample.part": (
        "(logits [S, N], first token, best [ranks, S, 2], rows: SampleRows) -> [S, 2] f32: weight, drawn token",
        (),
    ),
    "sample.pick": (
        "(best [ranks, S, 2], drawn [ranks, S, 2], temperature [S]) -> (tokens [S] int32, finite [S] bool)",
        (),
    ),
    "rope_angles": ("(positions [T], frequencies [rotated / 2], amplitude) -> (cos, sin), both [T, rotated] f32", ()),
    "step_inputs": (
        "((history [N, L], computed [N], prompt_len [N]), request [R], n_query [R], row [T], offset [T]) -> "
        "(tokens [T], positions [T], owner [T], prompt_len [T], kv_len [R])",
        (),
    ),
    "kv_slots": ("(table [N, places], owner [T], positions [T]) -> slots [T]", ()),
    "step_outputs": (
        "((history [N, L], lengths [N], computed [N]), request [R], n_query [R], sample_request [S], tokens [S], "
        "finite [S], vocabulary) -> tokens [S] for the host; the state in place",
        (),
    ),
    "reduce_add_rms_norm": (
        "(x [T, size], residual [T, size], weight, eps) -> (norm of the sum, residual + x summed over the ranks)",
        ("comm.all_reduce", "add_rms_norm"),
    ),
    "comm.all_reduce": ("(x [T, size]) -> [T, size], the sum over the ranks", ()),
    "comm.all_gather": ("(x [T, size] of any type) -> [T, ranks size]", ()),
    "comm.broadcast": ("(x [T, size] of any type) -> [T, size], as rank 0 gives it", ()),
    "comm.exchange": ("(x [T, size] of any type) -> [ranks, T, size]", ()),
    "attn.merge": ("(parts [P, T, heads, size], lses [P, T, heads]) -> ([T, heads, size], [T, heads])", ()),
}

_ROW_WISE = frozenset(
    {
        *("embedding", "silu_and_mul", "gelu_and_mul", "rope", "rope_kv_write", "rope_angles"),
        *("gelu_tanh", "step_inputs", "kv_slots", "step_outputs", "moe.dispatch"),
    }
)
"""Ops without matrix products and sums. torch may split a sum along a row differently if there are few rows."""


@hookimpl
def register_ops() -> Iterable[OpSpec]:
    """All ops of core; each is one module of llmcore.ops."""
    for name, (signature, parts) in _OPS.items():
        module = f"llmcore.ops.{name.replace('.', '_')}"
        yield OpSpec(name=name, module=module, signature=signature, expands_to=parts, row_wise=name in _ROW_WISE)
