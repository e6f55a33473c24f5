"""Nine of ten files of core have a test file of their own, in the folder that mirrors theirs.

A file without behaviour (declarations, tables, re-exports) needs none. Ops and CPU kernels are tested by tables, which
other tests hold complete.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from source import CORE, ROOT, parsed

TESTS = ROOT / "tests" / "core"

TABLES = {
    "ops": ("ops/test_kernels_cpu.py", "builtin/test_ops.py"),
    "builtin/cpu": ("ops/test_kernels_cpu.py", "builtin/test_cpu_kernels.py"),
}
"""Folder -> (the test that runs a table of everything in it, the test that compares the table with the files)."""

DECLARATIONS = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.Expr, ast.If, ast.Pass)


def behaves(file: Path) -> bool:
    """True if a function of the file has a body. A docstring alone is a declaration."""
    functions = (node for node in ast.walk(parsed(file)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return any(not isinstance(statement, DECLARATIONS) for function in functions for statement in function.body)


def own_test(file: Path) -> Path:
    """tests/core/kv/test_slots.py for kv/slots.py; a package's own file has the package's name."""
    name = file.parent.name if file.name == "__init__.py" else file.stem
    return TESTS / file.parent.relative_to(CORE) / f"test_{name}.py"


def by_table(file: Path) -> bool:
    return str(file.parent.relative_to(CORE)) in TABLES


def test_nine_of_ten_files_have_a_test_of_their_own() -> None:
    files = [file for file in sorted(CORE.rglob("*.py")) if behaves(file)]
    lacking = [str(file.relative_to(CORE)) for file in files if not by_table(file) and not own_test(file).is_file()]
    assert 10 * len(lacking) <= len(files), f"{len(lacking)} of {len(files)} have none: {', '.join(lacking)}"


@pytest.mark.parametrize("folder", TABLES)
def test_tables_are_there(folder: str) -> None:
    for name in TABLES[folder]:
        assert any(isinstance(node, ast.Assert) for node in ast.walk(parsed(TESTS / name)))


def test_the_rules_can_fail(tmp_path: Path) -> None:
    cases = (
        ("def f():\n    return 1\n", True),
        ("class A:\n    def f(self):\n        for i in x: pass\n", True),
        ("class P(Protocol):\n    def f(self) -> int:\n        '''Says.'''\n", False),
        ("from a import b\nX = 1\n", False),
    )
    for number, (code, wanted) in enumerate(cases):
        file = tmp_path / f"{number}.py"
        file.write_text(code)
        assert behaves(file) == wanted, code
    assert own_test(CORE / "cli" / "plan.py") == TESTS / "cli" / "test_plan.py"
    assert own_test(CORE / "builtin" / "devices" / "__init__.py") == TESTS / "builtin" / "devices" / "test_devices.py"
    assert not by_table(CORE / "cli" / "plan.py") and by_table(CORE / "ops" / "rope.py")
