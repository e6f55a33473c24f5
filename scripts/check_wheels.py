"""Build every distribution as a wheel, install some in a clean environment, and check that they work.

The packages of tests/third_party are installed as well, and check_third_party.py uses them. The clean environment has
the dependencies of the one that runs this script, but none of our own distributions. Usage: check_wheels.py [FOLDER
FOR THE WHEELS]
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

import check_third_party

ROOT = Path(__file__).resolve().parent.parent
INSTALLED = ("llmcore-engine", "plugin-llama")
STRANGERS = Path("tests", "third_party")
OURS = ("__editable__", "llmcore", "plugin_", "pip", "distutils-precedence")


def projects() -> list[Path]:
    """Returns the folders of all distributions, relative to the root."""
    return [
        Path(),
        *(p.parent.relative_to(ROOT) for p in sorted(ROOT.glob("plugins/*/pyproject.toml"))),
        Path("contrib_models"),
        *(p.parent.relative_to(ROOT) for p in sorted((ROOT / STRANGERS).glob("*/pyproject.toml"))),
    ]


def build(wheels: Path, scratch: Path) -> None:
    """Build wheels from a copy of the tree, so that old build folders cannot leak into them."""
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", "dist")
    for folder in ("core", "plugins", "contrib_models", STRANGERS):
        shutil.copytree(ROOT / folder, scratch / folder, ignore=skip)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, scratch / file)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(wheels), *(f"./{p}" for p in projects())], check=True, cwd=scratch)


def clean_environment(folder: Path) -> Path:
    """Make a virtual environment that sees this one's dependencies. Returns its `bin`."""
    venv.create(folder, with_pip=True)
    dependencies = folder / "dependencies"
    dependencies.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith(OURS):
            (dependencies / entry.name).symlink_to(entry)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    (site / "dependencies.pth").write_text(f"{dependencies}\n")
    return folder / "bin"


def listed(bin_folder: Path) -> set[str]:
    """Returns the distributions that `llmcore plugins --json` lists as working."""
    command = [str(bin_folder / "llmcore"), "plugins", "--json"]
    rows = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {plugin["dist"] for plugin in rows if plugin["state"] == "active"}


def main(wheels: Path) -> int:
    """Returns 0 if every installed wheel is listed, and the third-party package does all that it says."""
    with tempfile.TemporaryDirectory() as scratch:
        build(wheels, Path(scratch) / "tree")
        bin_folder = clean_environment(Path(scratch) / "venv")
        offline = ["--quiet", "--no-index", "--no-deps", "--find-links", str(wheels)]
        subprocess.run([str(bin_folder / "pip"), "install", *offline, *INSTALLED], check=True)
        missing = set(INSTALLED) - listed(bin_folder)
        strangers = check_third_party.DISTRIBUTIONS
        subprocess.run([str(bin_folder / "pip"), "install", *offline, *strangers], check=True)
        check_third_party.check(bin_folder, ROOT / STRANGERS, Path(scratch) / "third_party")
    print(f"{len(list(wheels.glob('*.whl')))} wheels built; not listed: {', '.join(sorted(missing)) or 'none'}")
    return 1 if missing else 0


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(main(Path(sys.argv[1]).resolve()))
    with tempfile.TemporaryDirectory() as temporary:
        sys.exit(main(Path(temporary)))
