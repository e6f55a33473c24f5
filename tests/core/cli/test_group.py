"""Groups of commands that plugins register: names, headings, what is missing, and what is imported when."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from llmcore.api.errors import ConfigError
from llmcore.cli.group import PluginGroup, commands, loaded

COMMANDS = """
import click
from llmcore.api import CommandSpec, hookimpl


@hookimpl
def register_commands():
    yield CommandSpec(name="zoo", summary="Show animals.", command="zoo_code:zoo", heading="Look")
    yield CommandSpec(name="ape", summary="Be one.", command="zoo_code:ape", heading="Animals")
    yield CommandSpec(name="feed", summary="Feed.", command="zoo_code:feed", heading="Run", prepare="zoo_code:open")
    yield CommandSpec(name="zoo add", summary="Add an animal.", command="zoo_code:add", heading="Commands")
    yield CommandSpec(name="zoo --count", summary="Count.", command="zoo_code:count")
"""

CODE = """
import click
from llmcore.cli.group import PluginGroup

OPENED = []


@click.group("zoo", cls=PluginGroup, below="zoo", invoke_without_command=True)
@click.pass_context
def zoo(ctx):
    click.echo("zoo")


@click.command()
@click.argument("name")
def add(name):
    click.echo(f"added {name}")


@click.command()
def ape():
    click.echo("ape")


@click.command()
def feed():
    click.echo(f"fed after {OPENED}")


def open():
    OPENED.append("gates")


def count():
    return 3
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> click.Group:
    """A group with the commands above and core's."""
    (tmp_path / "zoo_plugin.py").write_text(COMMANDS)
    (tmp_path / "zoo_code.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "zoo_code", raising=False)
    monkeypatch.setenv("LLMCORE_PLUGINS", str(tmp_path / "zoo_plugin.py"))

    @click.group(cls=PluginGroup, below="")
    def group() -> None:
        """All commands."""

    return group


def test_help_lists_commands_by_heading_and_imports_none(root: click.Group) -> None:
    shown = CliRunner().invoke(root, ["--help"]).output
    headings = [line for line in shown.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings == ["Options:", "Run:", "Look:", "Animals:"]
    run, look = shown.index("\nRun:"), shown.index("\nLook:")
    assert run < shown.index("  feed ") < look < shown.index("  zoo ") < shown.index("\nAnimals:")
    assert "  add" not in shown and "--count" not in shown, "a command below another is listed by that one"
    assert "zoo_code" not in sys.modules


def test_commands_run_and_are_imported_when_they_are_named(root: click.Group) -> None:
    assert CliRunner().invoke(root, ["ape"]).output == "ape\n"
    assert "zoo_code" in sys.modules


def test_what_prepares_a_command_runs_before_it(root: click.Group) -> None:
    assert CliRunner().invoke(root, ["feed"]).output == "fed after ['gates']\n"


def test_a_group_has_the_commands_below_it(root: click.Group) -> None:
    shown = CliRunner().invoke(root, ["zoo", "--help"]).output
    assert "Commands:" in shown and "  add  Add an animal." in shown
    assert "count" not in shown and "ape" not in shown
    assert CliRunner().invoke(root, ["zoo", "add", "lion"]).output == "zoo\nadded lion\n"


def test_an_option_of_another_command_is_loaded_by_its_name(root: click.Group) -> None:
    context = click.Context(root)
    assert commands(context)["zoo --count"].summary == "Count."
    assert loaded(context, "zoo --count")() == 3
    with pytest.raises(ConfigError, match="there is no command 'zoo --feed'; upgrade or repair"):
        loaded(context, "zoo --feed")


def test_an_unknown_command_names_the_nearest(root: click.Group) -> None:
    result = CliRunner().invoke(root, ["zo"])
    assert result.exit_code == 2 and "There is no command 'zo'. Did you mean zoo?" in result.output
    result = CliRunner().invoke(root, ["zoo", "ad", "x"])
    assert result.exit_code == 2 and "There is no command 'ad'. Did you mean add?" in result.output


def test_a_command_of_a_distribution_that_is_missing_names_it(
    root: click.Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = {"acme-zoo": {"commands": ["zoo feed", "safari"], "options": []}}
    monkeypatch.setattr("llmcore.registry.official.official_plugins", lambda: table)
    for args, name in ((["safari"], "safari"), (["zoo", "feed"], "zoo feed")):
        error = CliRunner().invoke(root, args).exception
        assert isinstance(error, ConfigError)
        assert str(error) == f"`llmcore {name}` comes with acme-zoo, which is not installed; pip install acme-zoo"
    with pytest.raises(ConfigError, match="comes with acme-zoo"):
        loaded(click.Context(root), "zoo feed")


def test_commands_are_there_where_the_plugins_are_named_wrongly(
    root: click.Group, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LLMCORE_PLUGINS", "nobody-has-this")
    assert "generate" in commands(click.Context(root))
    assert "there is no plugin 'nobody-has-this'" in caplog.text
