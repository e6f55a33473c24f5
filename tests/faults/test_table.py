"""README.md: every row is tested here or says why it is not."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"loaded_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def page() -> Any:
    return load(ROOT / "scripts" / "page_of_faults.py")


def test_every_row_has_a_test_or_a_reason() -> None:
    table = page()
    rows = {*table.ROWS, *table.EXCLUDED}
    assert rows == set(range(1, max(rows) + 1))
    tests = table.tests_by_row()
    assert not [row for row in table.ROWS if row not in tests]


def test_rows_are_read_from_names() -> None:
    numbers = page().numbers
    assert list(numbers("14_to_16_and_35_")) == [14, 15, 16, 35]
    assert list(numbers("10, 11")) == [10, 11]


def test_the_example_for_authors(llmcore_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/authors/faults.md shows it."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("from llmcore.api import hookimpl\n\n\n@hookimpl\ndef on_shutdown():\n    pass\n")
    load(ROOT / "docs" / "examples" / "faults" / "test_mine.py").test_others_do_not_notice(llmcore_server)
