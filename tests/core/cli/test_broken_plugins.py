"""`--help`, `plugins` and `env` beside plugins that are broken in every way, all at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HEAD = "from llmcore.api import *\nfrom llmcore.api import hookimpl\n"
HOOK = HEAD + "@hookimpl\ndef register_{hook}():\n    {body}\n    yield\n"

CODE = {
    "absent": "import module_that_is_absent",
    "syntax": "def",
    "exits": "raise SystemExit(0)",
    "odd": "class Odd(BaseException):\n    def __str__(self):\n        raise OSError\nraise Odd",
    "prints": "print('{')\nimport sys\nsys.stdout.write('noise')\nraise ValueError('printed')",
    "empty": "x = 1",
    "misspelt": HEAD + "@hookimpl\ndef register_comands():\n    return []",
    "unmarked": "def register_commands():\n    return []",
    "hook-exits": HOOK.format(hook="commands", body="raise SystemExit(3)"),
    "hook-options": HOOK.format(hook="options", body="print('noise'); 1 / 0"),
    "wrong": HOOK.format(hook="commands", body="yield 7"),
    "summary": HOOK.format(hook="commands", body="yield CommandSpec(name='c', command='m:c', summary=None)"),
    "signature": HEAD + "@hookimpl\ndef register_commands(nothing):\n    return []",
    "huge": "raise ValueError('x\\n' * 10**6)",
}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which all of them are installed; two others share a name, and one has no metadata."""
    site = tmp_path_factory.mktemp("site")

    def install(dist: str, points: str, metadata: str | None = "") -> None:
        info = site / f"{dist}-1.0.dist-info"
        info.mkdir()
        (info / "entry_points.txt").write_text(f"[llmcore]\n{points}\n")
        if metadata is not None:
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.0\n{metadata}")

    for name, code in CODE.items():
        module = f"broken_{name.replace('-', '_')}"
        (site / f"{module}.py").write_text(code)
        install(f"broken_{name}", f"{name} = {module}")
    install("twin_one", "twin = json")
    install("twin_two", "twin = json")
    install("usurper", "fcfs = json")
    install("no_value", "nothing")
    install("no_metadata", "anything = json", None)
    install("no_module", "colon = json:loads")
    return {**os.environ, "PYTHONPATH": str(site)}


def run(environment: dict[str, str], *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "llmcore.cli", *args]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done


@pytest.mark.parametrize("args", [["--help"], ["serve", "--help"], ["serve", "--help-all"], ["plugins", "--help"]])
def test_help_works(environment: dict[str, str], args: list[str]) -> None:
    done = run(environment, *args)
    assert done.returncode == 0 and done.stdout.startswith("Usage: llmcore")
    for variables in ({"LLMCORE_PLUGINS": "exits,nobody"}, {"LLMCORE_CONFIG": "/none.yaml"}):
        assert run({**environment, **variables}, *args).returncode == 0


def test_plugins_lists_every_one_with_what_to_do(environment: dict[str, str]) -> None:
    done = run(environment, "plugins", "--json")
    assert done.returncode == 0
    rows = json.loads(done.stdout)  # nothing that a plugin printed is in it
    states = {(row["dist"], row["name"]): row["state"] for row in rows}
    notes = {(row["dist"], row["name"]): " ".join(row["notes"]) for row in rows}
    broken = [(f"broken_{name}", name) for name in CODE]
    for key in [*broken, ("twin_one", "twin"), ("twin_two", "twin"), ("usurper", "fcfs"), ("no_module", "colon")]:
        assert states[key] == "failed", key
        assert f"--plugins=-{key[1]}" in notes[key] or f"--plugins=-{key[0]}:{key[1]}" in notes[key]
    assert states["llmcore-engine", "fcfs"] == states["plugin-openai", "openai"] == "active"
    assert "--plugins twin_one:twin" in notes["twin_one", "twin"]
    assert "--plugins usurper:fcfs" in notes["usurper", "fcfs"]


def test_env_names_them_all(environment: dict[str, str]) -> None:
    done = run(environment, "env", "--json")
    assert done.returncode == 0
    failures = json.loads(done.stdout)["failures"]
    assert {f"broken_{name}:{name}" for name in CODE} <= set(failures)
    assert all(len(text) < 1500 for text in failures.values())


def test_a_start_without_them_is_as_ever(environment: dict[str, str], tmp_path: Path) -> None:
    done = run(environment, "config", "show", str(tmp_path))
    assert done.returncode == 0 and "plugin 'exits' (broken_exits 1.0) failed in import" in done.stderr
    done = run(environment, "config", "show", "--plugins", "exits", "odd")
    assert done.returncode == 1 and "'exits'" in done.stderr and "'odd'" in done.stderr
