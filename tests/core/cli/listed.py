"""Runs a listing command in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result
from llmcore.cli import root

ROOT = Path(__file__).resolve().parents[3]


EXAMPLES = ROOT / "docs" / "examples"


def run(*args: str) -> Result:
    return CliRunner().invoke(root, [*args])


def rows(*args: str) -> list[dict[str, Any]]:
    result = run(*args, "--json")
    assert result.exit_code == 0, result.output
    found: list[dict[str, Any]] = json.loads(result.stdout)
    return found


def plugin(tmp_path: Path, code: str, name: str = "mine") -> str:
    path = tmp_path / f"{name}.py"
    path.write_text(f"from llmcore.api import *\nfrom llmcore.api import hookimpl\n{code}")
    return str(path)
