"""The table of ops: every file of llmcore.ops is an op in it, or shared by several, and its entries are true."""

from __future__ import annotations

import importlib
from pathlib import Path

import llmcore.ops
import pytest
from llmcore.builtin.ops import register_ops

OPS = {spec.name: spec for spec in register_ops()}
SHARED = {"attention", "comm", "moe", "philox"}
"""Files that several ops share."""


def test_the_table_is_complete() -> None:
    files = {file.stem for file in Path(llmcore.ops.__file__).parent.glob("*.py")} - {"__init__"}
    modules = {spec.module.rpartition(".")[2] for spec in OPS.values()}
    assert modules | SHARED == files and not modules & SHARED
    assert len(modules) == len(OPS)


@pytest.mark.parametrize("name", OPS)
def test_an_op_has_what_its_contract_says(name: str) -> None:
    module = importlib.import_module(OPS[name].module)
    assert hasattr(module, "reference") or hasattr(module, "make")
    assert callable(module.samples) and callable(module.cost)
    assert set(module.TOLERANCE) == {"f32", "f16", "bf16"}
    assert bool(OPS[name].expands_to) == hasattr(module, "expand")
    assert set(OPS[name].expands_to) <= set(OPS)
