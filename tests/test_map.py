"""docs/architecture.md leads to the code: each of its searches finds the function that answers the question."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from source import ROOT, parsed

PAGE = ROOT / "docs" / "architecture.md"

QUESTIONS = 12
MOST_LINES = 12
"""Lines that one search may find. A reader can look at all of them."""

MOST_HOPS = 3
MOST_WORDS = 900


@dataclass(frozen=True)
class Row:
    """One row of the table: a question, an expression, folders, and the functions from the first to the last hop."""

    question: str
    pattern: str
    folders: tuple[str, ...]
    hops: tuple[str, ...]

    def __str__(self) -> str:
        return self.question

    def found(self) -> list[tuple[Path, int]]:
        """Files and numbers of the lines that the search of the page finds."""
        command = ["grep", "-rniE", "--include=*.py", self.pattern, *self.folders]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        lines = [line.split(":", 2) for line in done.stdout.splitlines()]
        return [(ROOT / file, int(number)) for file, number, _ in lines]


def rows() -> list[Row]:
    """The rows of "Where it happens"."""
    text = PAGE.read_text().partition("## Where it happens")[2].partition("\n## ")[0]
    cells = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")][2:]
    return [
        Row(
            question.strip(),
            pattern.strip("`"),
            tuple(folders.strip("`").split()),
            tuple(re.findall("`(.+?)`", answer)),
        )
        for question, pattern, folders, answer in cells
    ]


@cache
def functions() -> dict[str, list[tuple[Path, ast.FunctionDef]]]:
    """Every function of core and plugins by its qualified name."""
    found: dict[str, list[tuple[Path, ast.FunctionDef]]] = {}

    def visit(file: Path, node: ast.AST, name: str) -> Iterator[tuple[str, ast.FunctionDef]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef):
                own = f"{name}.{child.name}".removeprefix(".")
                if isinstance(child, ast.FunctionDef):
                    yield own, child
                yield from visit(file, child, own)

    for folder in ("core", "plugins"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            if "build" not in file.parts:
                for name, node in visit(file, parsed(file), ""):
                    found.setdefault(name, []).append((file, node))
    return found


def test_the_page_answers_every_question() -> None:
    assert len(rows()) == QUESTIONS
    assert len(PAGE.read_text().split()) <= MOST_WORDS


@pytest.mark.parametrize("row", rows(), ids=str)
def test_a_search_finds_the_function_that_answers(row: Row) -> None:
    lines = row.found()
    assert 0 < len(lines) <= MOST_LINES, f"{len(lines)} lines for {row.pattern!r}"
    answers = functions()[row.hops[0]]
    assert any(
        file == where and node.lineno <= line <= (node.end_lineno or 0)
        for file, line in lines
        for where, node in answers
    ), f"no line is in {row.hops[0]}"


@pytest.mark.parametrize("row", rows(), ids=str)
def test_each_hop_is_called_by_the_one_before_it(row: Row) -> None:
    assert 1 <= len(row.hops) <= MOST_HOPS
    for before, after in zip(row.hops, row.hops[1:], strict=False):
        called = after.rpartition(".")[2]
        names = {
            child.attr if isinstance(child, ast.Attribute) else child.id
            for _, node in functions()[before]
            for child in ast.walk(node)
            if isinstance(child, ast.Attribute | ast.Name)
        }
        assert after in functions() and called in names, f"{before} does not call {after}"
