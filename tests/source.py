"""Our own sources, for the tests that read them."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CORE = ROOT / "core" / "llmcore"
PLUGINS = sorted(
    file
    for folder in (*(ROOT / "plugins").iterdir(), ROOT / "contrib_models", ROOT / "docs" / "examples")
    for file in folder.rglob("*.py")
    if "build" not in file.parts and not file.name.startswith("test_")
)


def name_of(file: Path) -> str:
    """The module's name below llmcore: "sched.plan", "" for the package itself."""
    parts = file.relative_to(CORE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(file): file for file in sorted(CORE.rglob("*.py")) if file.name != "__main__.py"}


@cache
def parsed(file: Path) -> ast.Module:
    """A file's tree; most rules look at each."""
    return ast.parse(file.read_text())


def top(name: str) -> str:
    return name.partition(".")[0]


def _packages() -> dict[str, dict[str, Path]]:
    found = {"llmcore": {f"llmcore.{name}": file for name, file in MODULES.items() if name}}
    for file in PLUGINS:
        parts = file.relative_to(ROOT).parts
        if parts[0] == "plugins":
            name = ".".join(Path(*parts[2:]).with_suffix("").parts).removesuffix(".__init__")
            found.setdefault(parts[2], {})[name] = file
    return found


PACKAGES = _packages()
"""Package -> its modules by name: core's, and those of each distribution under plugins/."""
