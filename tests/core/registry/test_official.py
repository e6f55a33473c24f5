"""Official plugins that are not installed are named where they would help, and nowhere else."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from llmcore.api.specs import DeviceInfo, PluginInfo
from llmcore.builtin.commands import register_commands
from llmcore.cli import main
from llmcore.config import make_config
from llmcore.registry import official
from llmcore.registry.official import (
    kernels_that_help,
    missing_command,
    missing_option,
    official_plugins,
    parsers_that_help,
    processors_that_help,
    sources_that_help,
)
from llmcore.registry.registry import Registry
from llmcore_devtools.tokenizer import write_tokenizer
from llmcore_server.supervisor.texts import with_parsers

ROOT = Path(__file__).resolve().parents[3]
HERMES = '{% if tools %}<tool_call>{"name": 1, "arguments": 2}</tool_call>{% endif %}'
"""A chat template with tools."""


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The distributions that seem to be installed: none but those that a test adds."""
    dists: list[str] = []
    monkeypatch.setattr(official, "available", lambda: [PluginInfo(dist, dist, "1", "m") for dist in dists])
    return dists


def test_an_accelerator_without_kernels_names_them(installed: list[str]) -> None:
    hopper = DeviceInfo("cuda", capability=90)
    (line,) = kernels_that_help(hopper)
    assert line == "plugin-triton is not installed, which has faster kernels for cuda: pip install plugin-triton"
    assert kernels_that_help(DeviceInfo("cpu")) == []
    installed.append("plugin_triton")
    assert kernels_that_help(hopper) == []


def test_a_chat_template_with_tools_names_the_parsers(installed: list[str]) -> None:
    (line,) = parsers_that_help("tool", [HERMES])
    assert line.startswith("plugin-parsers is not installed, which reads tool calls") and "pip install" in line
    assert parsers_that_help("tool", ["{% for tool in tools %}{{ tool }}{% endfor %}"]) == [line]
    assert parsers_that_help("tool", ["{{ messages }}", ""]) == []
    assert "pip install plugin-parsers" in parsers_that_help("reasoning", ["<|im_start|>x</think>"])[0]
    assert parsers_that_help("reasoning", [HERMES]) == []
    installed.append("plugin-parsers")
    assert parsers_that_help("tool", [HERMES]) == []


def test_a_plugin_that_fetches_models_is_named(installed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(official, "official_plugins", lambda: {"plugin-far": {"sources": ["far"]}, "plugin-x": {}})
    assert sources_that_help() == ["pip install plugin-far"]
    installed.append("plugin-far")
    assert sources_that_help() == []


def test_guided_decoding_names_its_plugin(installed: list[str]) -> None:
    assert processors_that_help([]) == ["guided decoding comes with pip install plugin-guided"]
    assert processors_that_help(["guided"]) == [], "another plugin brings it"
    installed.append("plugin-guided")
    assert processors_that_help([]) == []


def test_a_start_says_so(installed: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = write_tokenizer(tmp_path / "model")
    (directory / "chat_template.jinja").write_text(HERMES)
    _, rows = with_parsers(Registry(()), make_config(), str(directory))
    assert "plugin-parsers is not installed" in caplog.text
    assert ("not installed", "guided decoding comes with pip install plugin-guided") in rows
    caplog.clear()
    installed += ["plugin-parsers", "plugin-guided"]
    _, rows = with_parsers(Registry(()), make_config(), str(directory))
    assert "not installed" not in caplog.text + str(rows)
    installed.clear()
    with_parsers(Registry(()), make_config(tool_call_parser="none", reasoning_parser="none"), str(directory))
    assert "plugin-parsers" not in caplog.text, "none was asked for"


def test_an_option_of_a_plugin_that_is_not_installed_names_it(
    installed: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = {"devices": [], "parsers": {}, "processors": [], "options": ["speak_slowly"]}
    monkeypatch.setattr(official, "official_plugins", lambda: {"plugin-slow": entry})
    with pytest.raises(SystemExit):
        main(["serve", "m", "--speak-slowly", "1"])
    said = capsys.readouterr().err
    assert (
        said == "error: --speak-slowly is an option of plugin-slow, which is not installed; pip install plugin-slow\n"
    )


def test_what_an_extra_brings_is_installed_by_its_name(installed: list[str]) -> None:
    serve = '`llmcore serve` comes with llmcore-server, which is not installed; pip install "llmcore-engine[server]"'
    assert missing_command("serve") == serve
    assert missing_command("bench") == (
        '`llmcore bench` comes with llmcore-devtools, which is not installed; pip install "llmcore-engine[devtools]"'
    )
    for option in ("port", "server_port"):
        told = missing_option(option)
        assert told == 'is an option of llmcore-server, which is not installed; pip install "llmcore-engine[server]"'
    assert missing_command("generate") is None and missing_option("model_dir") is None
    installed += ["llmcore_server", "Llmcore-Devtools"]
    assert missing_command("serve") is missing_command("bench") is missing_option("port") is None


def test_a_command_that_is_not_installed_is_one_line(
    installed: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    core = {spec.name: spec for spec in register_commands()}
    monkeypatch.setattr("llmcore.cli.group.commands", lambda ctx: core)
    for args in (["serve", "m"], ["bench", "latency", "m"], ["plugins", "new", "x"]):
        with pytest.raises(SystemExit) as end:
            main(args)
        (line,) = capsys.readouterr().err.splitlines()
        assert end.value.code == 2 and "which is not installed; pip install" in line, line


def test_the_table_names_distributions_of_this_tree_and_is_package_data() -> None:
    projects = (*ROOT.glob("plugins/*/pyproject.toml"), ROOT / "contrib_models" / "pyproject.toml")
    assert set(official_plugins()) <= {tomllib.loads(file.read_text())["project"]["name"] for file in projects}
    assert {"plugin-triton", "plugin-parsers", "plugin-guided"} <= set(official_plugins())
