"""Which kernels release before their wait, and which read results before it: see llmcore_triton.launch."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import llmcore_triton

ROOT = Path(llmcore_triton.__file__).parent

SHORT = {"norm_rows", "rotate_and_store", "_quantized", "merge_row", "merge_tile", "router", "select", "_sum"}
"""Kernels that let the next one start at once. It may start while the kernel ahead of them still runs."""

AHEAD = {
    "grouped": None,
    "per_head": None,
    "over_latents": None,
    "merge_row": {"grouped", "per_head", "over_latents"},
    "down_of_token": {"gate_up_of_token"},
    "down_of_choices": {"gate_up_of_choices"},
}
"""Kernel that reads other data than weights before its `wait` -> the kernels ahead of it, which must release after
theirs. None: a linear that makes queries always runs between the step's lists and it."""


def kernels() -> Iterator[tuple[str, list[str]]]:
    """Yields each kernel's name and what it does, in the order of the source: "wait", "release", "early read"."""
    for file in sorted(ROOT.rglob("*.py")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(one) for one in node.decorator_list):
                calls = [part for part in ast.walk(node) if isinstance(part, ast.Call)]
                does = [_does(call) for call in sorted(calls, key=lambda call: (call.lineno, call.col_offset))]
                if "wait" in does:
                    yield node.name, [one for one in does if one]


def _does(call: ast.Call) -> str:
    name = ast.unparse(call.func)
    if name in ("wait", "release"):
        return name
    # what a kernel reads before `wait` bypasses the L1 cache, unless it is a weight; `row_of` reads so
    passing = any(ast.unparse(keyword) == "cache_modifier='.cg'" for keyword in call.keywords)
    return "early read" if passing or name == "row_of" else ""


def test_short_kernels_release_at_once() -> None:
    first = {name for name, does in kernels() if "release" in does and does.index("release") < does.index("wait")}
    assert first == SHORT


def test_what_is_read_early_is_older_than_a_kernel_that_releases_late() -> None:
    early = {name for name, does in kernels() if "early read" in does[: does.index("wait")]}
    assert early == set(AHEAD)
    assert not SHORT & set().union(*filter(None, AHEAD.values()))
