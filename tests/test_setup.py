"""scripts/setup.sh and find_python.sh: which Python `make` sets up with, tried with interpreters that only pretend."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("bash", "env", "sed", "dirname", "cat", "sha256sum", "cut", "mkdir", "cp", "rm", "chmod")

FAKE = """#!/bin/bash
# Python {version}, as far as these scripts look at one.
case "$1 $2" in
    "--version "*) echo "Python {version}.1" ;;
    "-m venv") rm -rf "$4"; mkdir -p "$4/bin"; cp "$0" "$4/bin/python"; echo "venv by {version}" >>"{log}" ;;
    "-m pip") echo "pip of {version}: $*" >>"{log}" ;;
    "-c import pip") ;;
    "- "*) exec {real} -c '
import sys
sys.argv, sys.version_info = sys.argv[1:], (*map(int, "{version}".split(".")), 1)
{more}
exec(sys.stdin.read())' "$@" ;;
    *) exit 99 ;;
esac
"""


class Machine:
    """A PATH with the tools that the scripts need and no Python, and a copy of the tree to set up."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        self.bin.mkdir()
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool) or tool)
        self.log = folder / "log"
        self.tree = folder / "tree"
        for name in ("pyproject.toml", "constraints.txt", "contrib_models/pyproject.toml", "plugins/a/pyproject.toml"):
            (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
            (self.tree / name).write_text((ROOT / name.replace("/a/", "/llama/")).read_text())
        shutil.copytree(ROOT / "scripts", self.tree / "scripts", ignore=shutil.ignore_patterns("*.py", "__pycache__"))

    def python(self, name: str, version: str, more: str = "") -> Path:
        """An interpreter on PATH."""
        path = self.bin / name
        path.write_text(FAKE.format(version=version, log=self.log, real=sys.executable, more=more))
        path.chmod(0o755)
        return path

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": str(self.bin)}
        return subprocess.run(command, cwd=self.tree, env=environment, capture_output=True, text=True, check=False)

    def find(self, *asked: str) -> str:
        done = self.run("scripts/find_python.sh", *asked)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def setup(self, asked: str = "") -> list[str]:
        """What is done by a setup."""
        self.log.write_text("")
        done = self.run("scripts/setup.sh", asked, ".venv", ".venv/.installed", "-e", ".")
        assert done.returncode == 0, done.stderr
        return self.log.read_text().splitlines()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize(
    ("versions", "found"),
    [
        (["3.11"], "python3.11"),
        (["3.12", "3.11"], "python3.12"),
        (["3.11", "3.13"], "python3.13"),
        (["3.9", "3.14", "3.15"], "python3.14"),
    ],
)
def test_the_newest_that_is_supported_is_taken(machine: Machine, versions: Iterable[str], found: str) -> None:
    for version in versions:
        machine.python(f"python{version}", version)
    assert machine.find() == str(machine.bin / found)


def test_one_without_a_version_in_its_name_will_do(machine: Machine) -> None:
    machine.python("python3.9", "3.9")
    found = machine.python("python3", "3.12")
    assert machine.find() == str(found)


def test_one_that_is_named_is_taken_or_refused(machine: Machine) -> None:
    machine.python("python3.13", "3.13")
    older = machine.python("python3.11", "3.11")
    old = machine.python("python3.9", "3.9")
    assert machine.find("python3.11") == machine.find(str(older)) == str(older)
    done = machine.run("scripts/find_python.sh", str(old))
    assert done.returncode == 1 and " is 3.9" in done.stderr


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ('sys.modules["ensurepip"] = None', "lacks venv, which is a package of its own on Debian"),
        ("sys._is_gil_enabled = lambda: False", "is not the usual CPython"),
        ("sys.exit(127)", "python3.12 does not run"),
    ],
)
def test_one_that_will_not_do_is_passed_over(machine: Machine, more: str, why: str) -> None:
    machine.python("python3.12", "3.12", more)
    done = machine.run("scripts/find_python.sh")
    assert done.returncode == 1 and why in done.stderr
    machine.python("python3.11", "3.11")
    assert machine.find() == str(machine.bin / "python3.11")


def test_without_any_there_is_one_sentence(machine: Machine) -> None:
    for asked in ([], ["python9"]):
        done = machine.run("scripts/find_python.sh", *asked)
        assert done.returncode == 1 and done.stdout == ""
        (line,) = done.stderr.splitlines()
        assert line.startswith("Python >=3.11,<3.15 is needed, which torch has wheels for")
        assert "or name one: make serve PYTHON=/path/to/python" in line
    done = machine.run("scripts/setup.sh", "", ".venv", ".venv/.installed")
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1


def test_a_setup_is_done_once_and_kept_when_a_newer_python_comes(machine: Machine) -> None:
    machine.python("python3.11", "3.11")
    assert machine.setup()[0] == "venv by 3.11" and machine.setup() == []
    machine.python("python3.13", "3.13")
    assert machine.setup() == [], "the environment is as good as it was"
    assert machine.setup("python3.13")[0] == "venv by 3.13"
    (machine.tree / "constraints.txt").write_text("torch==9\n")
    backend, distributions = machine.setup()
    assert backend.startswith("pip of 3.13: -m pip install") and backend.endswith(" setuptools>=77")
    assert distributions.startswith("pip of 3.13: -m pip install") and distributions.endswith(" -e .")


@pytest.mark.parametrize("what", ["requires-python = ", "requires = "])
def test_every_distribution_says_the_same_of(what: str) -> None:
    """The Pythons it admits, and what builds it, which is installed for all of them at once."""
    files = [
        ROOT / "pyproject.toml",
        ROOT / "contrib_models" / "pyproject.toml",
        *ROOT.glob("plugins/*/pyproject.toml"),
    ]
    lines = [line for file in files for line in file.read_text().splitlines() if line.startswith(what)]
    assert len(lines) == len(files) and len(set(lines)) == 1
