"""The linear kernels.

Measurements choose the kernel of a linear: the one with the least time in `tuned/*.json` for its shape, dtype and
token bucket. Without measurements:
- one token goes to gemv, and up to 16 to small_rows (gated: to their fusions with the activation). Measured shapes
  would choose the same or nearly the same.
- more tokens go to cuBLAS, but on Hopper more than 64 tokens of a gated MLP go to many_rows.

--deterministic leaves only `fixed`, which has no other use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from llmcore.api import KernelSpec, OpContext, Requires

from llmcore_triton import tuned
from llmcore_triton.specs import CAPABILITY, COST, CUBLAS_COST, GPU, other_than_deterministic

FEW = Requires(device="cuda", capability=CAPABILITY, buckets=frozenset({0, 1, 2}))
"""Up to 64 tokens, for kernels that read weights once."""

ONE = replace(FEW, buckets=frozenset({0}))
"""One token. It is narrower than FEW, so that it comes first without measurements."""

MANY = Requires(device="cuda", capability=(90, 90), dtypes=frozenset({"bf16", "f16"}), buckets=frozenset({3, 4}))
"""More than 64 tokens, with Hopper's instructions to load tiles and to multiply them."""

_GATED = "linear_silu_and_mul"

Refuses = Callable[[OpContext], str | None]


def kernels() -> Iterable[KernelSpec]:
    """The kernels for few tokens, for one, for any number, and for the same bits in every batch."""
    yield _kernel("linear", "small_rows", "linear", FEW, _small_rows, "weights streamed once for up to 64 tokens")
    yield _kernel(_GATED, "small_rows", "linear", FEW, _fused_small_rows, "gate, up and activation in one launch")
    yield _kernel("linear", "gemv", "linear_gemv", ONE, None, "one token without tensor cores")
    yield _kernel(_GATED, "gemv", "linear_gemv", ONE, _fused_gemv, "one token, gate, up and activation in one launch")
    yield _kernel(
        _GATED, "many_rows", "linear_gated", MANY, _fused_many_rows, "gate, up and activation for many tokens"
    )
    yield _kernel("linear", "cublas", "linear_cublas", Requires(device="cuda"), None, "torch.nn.functional.linear")
    yield replace(
        _kernel(
            "linear", "fixed", "linear_fixed", GPU, other_than_deterministic, "one order of adding for every batch"
        ),
        batch_invariant=True,
    )


def _kernel(op: str, name: str, module: str, when: Requires, refuses: Refuses | None, summary: str) -> KernelSpec:
    return KernelSpec(
        op=op,
        name=name,
        make=f"llmcore_triton.{module}:make",
        when=when,
        refuses=refuses,
        cost=CUBLAS_COST if name == "cublas" else COST,
        summary=summary,
    )


def _small_rows(context: OpContext) -> str | None:
    if context.bucket == 2 and tuned.find("small_rows", context) is None:
        return "nobody has measured it here for 17 to 64 tokens"
    return None


def _fused_small_rows(context: OpContext) -> str | None:
    return _small_rows(context) or slower_than_parts("small_rows", context)


def _fused_gemv(context: OpContext) -> str | None:
    return slower_than_parts("gemv", context)


def _fused_many_rows(context: OpContext) -> str | None:
    inputs, size = (context.shape.get(name) for name in ("inputs", "size"))
    if not isinstance(inputs, int) or not isinstance(size, int):
        return "is made for one shape, and none is known"
    if inputs % 8 or size % 8:
        return f"needs inputs and size to be multiples of 8, has {inputs} and {size}"
    return slower_than_parts("many_rows", context)


def slower_than_parts(kernel: str, context: OpContext, op: str = "linear") -> str | None:
    """Returns why the op `op` with silu_and_mul after it is faster than `kernel`, or None.

    `resolve` cannot compare a composite with its expansion, which has no cost of its own. So this function compares
    them.
    """
    shape = dict(context.shape)
    if "inputs" not in shape or "size" not in shape:
        return None
    size = shape.pop("size")
    linear = {"bias": False, **shape, "outputs": 2 * int(size or 0)}
    first = tuned.fastest(replace(context, op=op, shape=linear))
    activation = replace(context, op="silu_and_mul", shape={"size": size})
    second = tuned.fastest(activation) or tuned.fastest_of_any_shape(activation)
    ours = tuned.microseconds(replace(context, kernel=kernel))
    if first is None:
        return None
    if ours is None:
        return f"nobody has measured it here, and a linear alone takes {first:g} us"
    apart = first + (second or 0.0)
    return None if ours < apart else f"takes {ours:g} us, linear and silu_and_mul {apart:g} us"
