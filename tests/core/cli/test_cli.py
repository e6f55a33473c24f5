"""The command `llmcore`: its help, its errors and their exit codes."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest
from ended import run
from llmcore.cli import main, root
from llmcore.cli.group import commands, loaded

COMMANDS = commands(click.Context(root))


FIRST = [name for name in COMMANDS if " " not in name]


@pytest.mark.parametrize("name", [name for name in COMMANDS if " --" not in name])
def test_the_registered_line_is_the_commands_own(name: str) -> None:
    command = loaded(click.Context(root), name)
    assert (command.help or "").splitlines()[0] == COMMANDS[name].summary


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run("--help", capsys=capsys)
    assert code == 0
    assert all(f"  {name} " in out for name in FIRST)


def test_importing_the_command_line_imports_no_torch() -> None:
    heavy = ["torch", "transformers", "falcon", "waitress"]
    commands = ", ".join(f"{spec.command.partition(':')[0]}" for spec in COMMANDS.values())
    code = f"import sys, {commands}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["confg"], 2, "There is no command 'confg'. Did you mean config?"),
        (["config", "show", "--prot", "1"], 2, "No such option '--prot'"),
        (["config", "show", "--port", "x"], 2, "error: --port: 'x' is not a whole number"),
        (["config", "show", "--mode"], 2, "--mode needs a value"),
        (["config", "show", "--plugins", "lama"], 2, "there is no plugin 'lama'"),
        (["config", "show", "--config", "/none.yaml"], 2, "--config /none.yaml: No such file"),
        (["serve"], 2, "No model is given"),
        (["serve", "--model_dir", "/none"], 2, "--model_dir /none does not exist"),
    ],
)
def test_errors_are_one_line(args: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    got, _, err = run(*args, capsys=capsys)
    assert got == code
    assert message in err
    assert "Traceback" not in err


def test_a_defect_shows_its_traceback_only_when_asked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmcore.cli.config.value_of", lambda *_: 1 / 0)
    code, _, err = run("config", "show", capsys=capsys)
    assert code == 1
    assert "ZeroDivisionError" in err and "LLMCORE_DEBUG=1" in err and "Traceback" not in err
    monkeypatch.setenv("LLMCORE_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        main(["config", "show"])
