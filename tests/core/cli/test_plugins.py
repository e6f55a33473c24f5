"""`llmcore plugins`: what takes part, what is left out, what failed."""

from __future__ import annotations

import json
from pathlib import Path

from listed import plugin, rows, run
from llmcore import __version__


def test_plugins_lists_built_ins_and_installed_ones() -> None:
    found = {row["name"]: row for row in rows("plugins")}
    assert found["llama"]["dist"] == "plugin-llama"
    assert found["llama"]["brings"] == {"model": ["llama", "llama_score"]}
    assert found["radix"]["dist"] == "llmcore-engine"
    assert all(row["state"] == "active" for row in found.values())
    assert f"plugin-llama {__version__}" in run("plugins").output


def test_plugins_shows_what_is_left_out_and_what_failed(tmp_path: Path) -> None:
    broken = plugin(tmp_path, "import module_that_is_absent", "broken")
    result = run("plugins", "--plugins", broken, "--plugins=-radix", "--json")
    found = {row["name"]: row for row in json.loads(result.stdout)}
    assert result.exit_code == 1, "a plugin that was named failed"
    assert (found["llama"]["state"], found["radix"]["state"], found["broken"]["state"]) == ("off", "off", "failed")
    assert "No module named 'module_that_is_absent'" in found["broken"]["notes"][0]
    assert "install 'module_that_is_absent', or leave it out" in found["broken"]["notes"][0]


def test_plugins_shows_declined_contributions(tmp_path: Path) -> None:
    code = "@hookimpl\ndef register_schedulers():\n    yield SchedulerSpec(name='s', make='m:m', api=99)\n"
    found = {row["name"]: row for row in rows("plugins", "--plugins", plugin(tmp_path, code))}
    assert found["mine"]["state"] == "active"
    assert "scheduler s: written for plugin interface 99" in found["mine"]["notes"][0]


def test_plugins_by_hook() -> None:
    names = {row["name"] for row in rows("plugins", "--hook", "register_models")}
    assert "llama" in names and "radix" not in names


def test_an_unknown_plugin_is_an_error_that_lists_what_exists() -> None:
    result = run("plugins", "--plugins", "lama")
    assert "there is no plugin 'lama'; installed: " in str(result.exception)
    assert "Did you mean llama" in str(result.exception)
