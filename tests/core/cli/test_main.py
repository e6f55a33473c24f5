"""The command line as people meet it: one process per case, as few as possible."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from llmcore.api.specs import OptionSpec
from llmcore.cli import main, root
from llmcore.cli.group import commands, loaded
from llmcore.cli.options import joined
from llmcore.config import plugin_settings, settings
from llmcore_devtools import registry_of


def run(*args: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `llmcore ARGS`, in this process."""
    with pytest.raises(SystemExit) as end:
        main(args)
    out, err = capsys.readouterr()
    code = end.value.code
    return (code if isinstance(code, int) else 1), out, err


ROOT = Path(__file__).resolve().parents[3]
KNOWN = (*settings(), *plugin_settings(spec for spec, _ in registry_of().specs(OptionSpec)))
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


def test_serves_first_page_is_short_and_help_all_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    _, first, _ = run("config", "show", "--help", capsys=capsys)
    _, whole, _ = run("config", "show", "--help-all", capsys=capsys)
    for setting in KNOWN:
        assert re.search(rf"--{setting.name}\b", whole)
        assert bool(re.search(rf"--{setting.name}\b", first)) == setting.first_page


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
    monkeypatch.setattr("llmcore.cli.config.shown_value", lambda *_: 1 / 0)
    code, _, err = run("config", "show", capsys=capsys)
    assert code == 1
    assert "ZeroDivisionError" in err and "LLMCORE_DEBUG=1" in err and "Traceback" not in err
    monkeypatch.setenv("LLMCORE_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        main(["config", "show"])


def test_config_show_with_origins(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "s.yaml"
    file.write_text("host: 0.0.0.0\nport: 1\nbatch_max_tokens: 4k\n")
    monkeypatch.setenv("LLMCORE_PORT", "2")
    args = ["config", "show", "--json", "--origin", "--config", str(file), "--mode", "a", "b", "--eos-id", "2", "3"]
    code, out, _ = run(*args, capsys=capsys)
    shown = json.loads(out)
    assert code == 0
    assert shown["port"] == {"value": 2, "origin": "LLMCORE_PORT"}
    assert shown["host"] == {"value": "0.0.0.0", "origin": f"host in {file}"}
    assert shown["batch_max_tokens"]["value"] == 4000
    assert shown["mode"] == {"value": ["a", "b"], "origin": "--mode"}
    assert shown["eos_id"]["value"] == [2, 3]


def test_what_config_show_prints_can_be_read_back(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _, first, _ = run("config", "show", "--port", "9", "--kernel", "a=b", "--origin", capsys=capsys)
    file = tmp_path / "s.yaml"
    file.write_text(first)
    _, again, _ = run("config", "show", "--config", str(file), capsys=capsys)
    _, plain, _ = run("config", "show", "--port", "9", "--kernel", "a=b", capsys=capsys)
    assert again == plain


def test_a_retired_flag_is_a_warning(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    code, _, _ = run("config", "show", "--use-dynamic-prompt-cache", capsys=capsys)
    assert code == 0
    assert "--use_dynamic_prompt_cache has no effect" in caplog.text


def test_plugins_are_filtered_by_every_source(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LLMCORE_PLUGINS", "lama")
    code, _, err = run("config", "show", capsys=capsys)
    assert code == 2 and "'lama'" in err
    code, _, _ = run("config", "show", "--plugins", "llama", capsys=capsys)
    assert code == 0


@pytest.mark.parametrize(
    ("args", "tokens"),
    [
        (["--port", "1", "M"], ["--port=1", "M"]),
        (["--server-port=1"], ["--port=1"]),
        (["--mode", "a", "b", "--port", "1"], ["--mode=a", "--mode=b", "--port=1"]),
        (["--disable-log-stats", "--x"], ["--disable_log_stats=true", "--x"]),
        (["--disable_log_stats=false"], ["--disable_log_stats=false"]),
        (["--plugins=-llama"], ["--plugins=-llama"]),
        (["--", "--port", "1"], ["--", "--port", "1"]),
    ],
)
def test_every_spelling_becomes_one_token(args: list[str], tokens: list[str]) -> None:
    assert list(joined(args, KNOWN)) == tokens


def test_config_show_takes_what_serve_takes(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run("config", "show", "/models/m", "--port", "1", "--json", "--origin", capsys=capsys)
    assert code == 0
    assert json.loads(out)["model_dir"] == {"value": "/models/m", "origin": "MODEL"}
    code, _, err = run("config", "show", "/models/m", "--model_dir", "/models/n", capsys=capsys)
    assert code == 2 and "MODEL is another path than --model_dir /models/n; give one of them" in err


def test_a_command_without_a_server_takes_no_settings_of_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "prompts").touch()
    plugin = str(ROOT / "docs" / "examples" / "register_options.py")
    args = ["generate", str(tmp_path / "prompts"), "--plugins", plugin]
    code, _, err = run(*args, "--probe_layers", "x", capsys=capsys)
    assert code == 2 and "--probe_layers: 'x' is not a whole number" in err
    for option in ("--port", "--use_tgi_api"):
        code, _, err = run(*args, option, "1", capsys=capsys)
        assert code == 2 and f"No such option '{option}'" in err


def test_words_too_many_are_not_shown_beside_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run("serve", "m", "x y", capsys=capsys)
    assert code == 2 and "One word more than this command takes (x y): put a value" in err
    code, _, err = run("serve", "--model_dir=m", "--api_keys=sk-one", "sk-two", "sk-three", capsys=capsys)
    assert code == 2 and "One word more than this command takes: put" in err
    assert "sk-" not in err


def test_a_file_of_settings_may_be_a_pipe(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A pipe can be read once, and both the plugins and the settings are in it."""
    reader, writer = os.pipe()
    os.write(writer, b"port: 4711\nplugins: [llama]\n")
    os.close(writer)
    code, out, _ = run("config", "show", "--json", "--config", f"/dev/fd/{reader}", capsys=capsys)
    os.close(reader)
    shown = json.loads(out)
    assert code == 0 and (shown["port"], shown["plugins"]) == (4711, ["llama"])
