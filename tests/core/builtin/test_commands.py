"""The commands of core: each file of llmcore.cli that has one is registered, under its name."""

from __future__ import annotations

import ast
from pathlib import Path

import click
import llmcore.cli
from llmcore.builtin.commands import register_commands
from llmcore.registry.loader import load

FOLDER = Path(llmcore.cli.__file__).parent


def test_every_command_is_listed_once_with_its_own_summary() -> None:
    specs = {spec.name: spec for spec in register_commands()}
    for name, spec in specs.items():
        command = load(spec.command)
        assert isinstance(command, click.Command), name
        assert (command.help or "").splitlines()[0] == spec.summary
    assert {spec.heading for spec in specs.values()} == {"Run", "Look"}


def test_no_file_with_a_command_is_left_out() -> None:
    files = {
        file.stem
        for file in FOLDER.glob("*.py")
        if any(
            isinstance(node, ast.FunctionDef) and node.name == "command" for node in ast.parse(file.read_text()).body
        )
    }
    assert files == {spec.name for spec in register_commands()}
