"""docs/faults.md: every row is tested here or says why it is not."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "page_of_faults.py"


def page() -> Any:
    spec = importlib.util.spec_from_file_location("page_of_faults", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_row_has_a_test_or_a_reason() -> None:
    table = page()
    assert set(table.ROWS) | set(table.EXCLUDED) == set(range(1, 67))
    tests = table.tests_by_row()
    assert not [row for row in table.ROWS if row not in tests]


def test_rows_are_read_from_names() -> None:
    numbers = page().numbers
    assert list(numbers("14_to_16_and_35_")) == [14, 15, 16, 35]
    assert list(numbers("10, 11")) == [10, 11]
