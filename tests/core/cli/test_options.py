"""Options that are settings: spellings, pages of help, sources, and words that are too many."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from ended import run
from llmcore.api.specs import OptionSpec
from llmcore.cli.options import joined
from llmcore.config import settings
from llmcore_devtools import registry_of

ROOT = Path(__file__).resolve().parents[3]


KNOWN = settings(spec for spec, _ in registry_of().specs(OptionSpec))


def test_serves_first_page_is_short_and_help_all_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    _, first, _ = run("config", "show", "--help", capsys=capsys)
    _, whole, _ = run("config", "show", "--help-all", capsys=capsys)
    for setting in KNOWN:
        assert re.search(rf"--{setting.name}\b", whole)
        assert bool(re.search(rf"--{setting.name}\b", first)) == setting.first_page


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
