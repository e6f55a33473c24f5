"""Two commits on one GPU in one run: benchmarks/gpu.py by turns, one table.

    git archive COMMIT --prefix=.base/ | tar x      # beside the tree; list .base in .git/info/exclude
    python3 scripts/gpu_by_turns.py .base . [--turns 2] [--wheels .whl] [-- ARGUMENTS OF gpu.py]

Each tree gets an environment of its own that sees the machine's torch and triton, because the entry points of two
versions cannot share one. The first turn of each tree compiles kernels while it starts, which no row counts. A row
shows the best figure of each tree, and the second tree's relative to the first's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

PIP = ("install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--disable-pip-version-check")


def environment(tree: Path, folder: Path, wheels: list[str]) -> Path:
    """The Python of a new environment in `folder` with all distributions of `tree`."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    own = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    (own / "machine.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")) + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), *PIP]
    subprocess.run([*pip, *wheels], check=True)
    projects = [tree, *(p.parent for p in sorted(tree.glob("plugins/*/pyproject.toml"))), tree / "contrib_models"]
    editable = [part for project in projects for part in ("-e", str(project.resolve()))]
    subprocess.run([*pip, "--no-build-isolation", *editable], check=True)
    return python


def turn(python: Path, tree: Path, arguments: list[str]) -> dict[str, float]:
    """Row -> its median in one run of gpu.py."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [str(python), "benchmarks/gpu.py", "--repeats", "1", "--json", file.name, *arguments]
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
        content = Path(file.name).read_text()
    if not content:
        sys.exit(f"{tree}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    rows: dict[str, Any] = json.loads(content)["rows"]
    return {name: row["median"] for name, row in rows.items()}


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs=2, type=Path)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--wheels", type=Path, default=Path(".whl"))
    given = sys.argv[1:]
    split = given.index("--") if "--" in given else len(given)
    options, arguments = parser.parse_args(given[:split]), given[split + 1 :]
    wheels = [str(path.resolve()) for path in sorted(options.wheels.glob("*.whl"))]
    with tempfile.TemporaryDirectory() as scratch:
        trees = [(tree, environment(tree, Path(scratch) / str(i), wheels)) for i, tree in enumerate(options.trees)]
        found: list[list[dict[str, float]]] = [[], []]
        for number in range(options.turns):
            for index, (tree, python) in enumerate(trees):
                rows = turn(python, tree, arguments)
                print(f"turn {number}, {tree}: {rows}", flush=True)
                found[index].append(rows)
    print(f"\n{'row':<14} {options.trees[0]!s:>12} {options.trees[1]!s:>12} {'change':>8}")
    for name in found[0][0]:
        best = max if name == "prefill" else min
        before, after = (best(rows[name] for rows in tree) for tree in found)
        print(f"{name:<14} {before:>12,.3f} {after:>12,.3f} {after / before - 1:>+8.1%}")


if __name__ == "__main__":
    main()
