"""Build every distribution as a wheel, install them in clean environments, and see that they work.

In the first environment are the engine and one family alone, without what only the server needs. In the second `pip`
finds what a family requires in the folder of wheels. Packages of strangers (tests/third_party) join it there, and
check_third_party.py puts them to work. The environments see the dependencies of the one that runs this script, but
none of our own distributions.
Usage: check_wheels.py [FOLDER FOR THE WHEELS]
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Iterable
from pathlib import Path

import check_installed
import check_third_party

ROOT = Path(__file__).resolve().parent.parent
STRANGERS = Path("tests", "third_party")
OURS = ("__editable__", "llmcore", "plugin_", "pip", "distutils-precedence")
SERVERS = ("falcon", "waitress", "zmq", "pyzmq", "prometheus_client")
"""What `site-packages` calls the dependencies of the server that the engine does without."""


def projects() -> list[Path]:
    """Returns the folders of all distributions, relative to the root."""
    return [
        Path(),
        *(p.parent.relative_to(ROOT) for p in sorted(ROOT.glob("plugins/*/pyproject.toml"))),
        Path("contrib_models"),
        *(p.parent.relative_to(ROOT) for p in sorted((ROOT / STRANGERS).glob("*/pyproject.toml"))),
    ]


def build(wheels: Path, scratch: Path) -> None:
    """Build wheels from a copy of the tree, so that no old build folder leaks into them; on every core at once."""
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", "dist")
    for folder in ("core", "plugins", "contrib_models", STRANGERS):
        shutil.copytree(ROOT / folder, scratch / folder, ignore=skip)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, scratch / file)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    command += ["--wheel-dir", str(wheels)]
    every = [f"./{project}" for project in projects()]
    shares = [every[first :: os.cpu_count() or 1] for first in range(os.cpu_count() or 1)]
    running = [subprocess.Popen([*command, *share], cwd=scratch) for share in shares if share]
    if any([process.wait() for process in running]):
        raise SystemExit("a wheel was not built")


def clean_environment(folder: Path, without: Iterable[str] = ()) -> Path:
    """A new virtual environment that sees this one's dependencies; returns its `bin`.

    `without`: how the names in `site-packages` begin that it does not see.
    """
    venv.create(folder)
    dependencies = folder / "dependencies"
    dependencies.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith((*OURS, *without)):
            (dependencies / entry.name).symlink_to(entry)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    (site / "dependencies.pth").write_text(f"{dependencies}\n")
    return folder / "bin"


def install(bin_folder: Path, wheels: Path, *arguments: str) -> None:
    """`pip install` in a clean environment, from the folder of wheels alone."""
    pip = [sys.executable, "-m", "pip", "--python", str(bin_folder / "python"), "install", "--quiet"]
    subprocess.run([*pip, "--no-index", "--find-links", str(wheels), *arguments], check=True)


def main(wheels: Path) -> None:
    """AssertionError or CalledProcessError with what does not work."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        build(wheels, scratch / "tree")
        alone = clean_environment(scratch / "alone", without=SERVERS)
        install(alone, wheels, "--no-deps", "llmcore-engine", "plugin-llama")
        check_installed.check_alone(alone, ROOT / STRANGERS, scratch / "llama")
        whole = clean_environment(scratch / "whole")
        install(whole, wheels, "plugin-qwen")
        check_installed.check_server(whole, ROOT / STRANGERS, scratch / "qwen")
        install(whole, wheels, "llmcore-devtools", *check_third_party.DISTRIBUTIONS)
        check_third_party.check(whole, ROOT / STRANGERS, scratch / "third_party")
    print(f"{len(list(wheels.glob('*.whl')))} wheels built and used")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]).resolve())
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
