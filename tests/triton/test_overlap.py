"""Which kernels release before their wait, and which read results before it: see llmcore_triton.launch."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import llmcore_triton

ROOT = Path(llmcore_triton.__file__).parent

SHORT = {
    *("rms_norm.norm_rows", "rope_kv_write.rotate_and_store", "quantized.quantize_rows._quantized"),
    *("attention.merge.merge_row", "attention.merge.merge_tile"),
    *("moe.route.select", "moe.combine._sum"),
}
"""Kernels that let the next one start at once. It may start while the kernel ahead of them still runs."""

_ATTENTION = ("attention.grouped.grouped", "attention.flashdecoding.per_head", "mla.latent.over_latents")
_EXPERTS = (
    ("moe.token_kernels.down_of_token", "moe.token_kernels.gate_up_of_token"),
    ("quantized.token_kernels.down_of_token", "quantized.token_kernels.gate_up_of_token"),
    ("quantized.direct_experts_kernel.down_of_choices", "quantized.direct_experts_kernel.gate_up_of_choices"),
)

AHEAD: dict[str, set[str]] = {
    **{name: set() for name in _ATTENTION},
    "attention.merge.merge_row": {*_ATTENTION},
    **{down: {gate_up} for down, gate_up in _EXPERTS},
    "moe.token_kernels.gate_up_of_token": {"moe.route.router"},
    "quantized.direct_kernel.words_times_tokens": set(),
}
"""Kernel that reads other data than weights before its `wait` -> kernels ahead of it, behind those that write the
data, which must release after their own `wait`. Attention has none: a linear that makes queries always runs between
the step's lists and it. The last kernel shares a function with experts, and reads weights alone."""


@cache
def compiled() -> dict[str, list[str]]:
    """Each compiled function with its module -> what it calls, in the order of the source. Loads that bypass the L1
    cache are "early read": before `wait` a kernel reads all but weights so."""
    found = {}
    for file in sorted(ROOT.rglob("*.py")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(one) for one in node.decorator_list):
                calls = [part for part in ast.walk(node) if isinstance(part, ast.Call)]
                module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
                ordered = sorted(calls, key=lambda call: (call.lineno, call.col_offset))
                found[f"{module}.{node.name}"] = [_what(call) for call in ordered]
    return found


def _what(call: ast.Call) -> str:
    passing = any(keyword.arg == "cache_modifier" for keyword in call.keywords)
    return "early read" if passing else ast.unparse(call.func)


@cache
def reads_early(name: str) -> bool:
    """Whether a compiled function has such a load, or calls one that has."""
    return any(
        "early read" in calls or any(map(reads_early, calls))
        for function, calls in compiled().items()
        if function.rpartition(".")[2] == name and "wait" not in calls
    )


def kernels() -> Iterator[tuple[str, list[str]]]:
    """Yields each kernel, and what it calls."""
    return ((name, calls) for name, calls in compiled().items() if "wait" in calls)


def test_short_kernels_release_at_once() -> None:
    first = {name for name, calls in kernels() if "release" in calls and calls.index("release") < calls.index("wait")}
    assert first == SHORT


def test_what_is_read_early_is_older_than_a_kernel_that_releases_late() -> None:
    before = {name: calls[: calls.index("wait")] for name, calls in kernels()}
    early = {name for name, calls in before.items() if "early read" in calls or any(map(reads_early, calls))}
    assert early == set(AHEAD)
    late = {name for name, calls in kernels() if "release" in calls} - SHORT
    assert set().union(*AHEAD.values()) <= late


def test_one_kernel_writes_before_its_wait() -> None:
    """The memory must be free when the last kernel that releases late has begun."""
    stores = {name for name, calls in kernels() if {"tl.store", "gl.store"} & {*calls[: calls.index("wait")]}}
    assert stores == {"moe.token_kernels.gate_up_of_token"}
