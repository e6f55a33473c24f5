"""Imports point one way, plugins see the public modules only, and what lists needs no torch. Read from the source."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from source import MODULES, PLUGINS, ROOT, parsed, top

pytestmark = pytest.mark.usefixtures("forgotten")

RANKS = (
    ("specs", "models"),
    (
        *("errors", "bridge", "subscribers", "protocols", "processors", "hookspecs", "config", "budget", "wire"),
        *("tallies", "overview", "bounds", "conversion"),
        *("child", "logs", "machine"),
        *("weights.map", "weights.dtypes"),
    ),
    ("registry", "well_formed", "plugins", "official", "resolve", "modes", "inspect"),
    ("ops",),
    ("layers",),
    ("weights", "kv", "sched", "text"),
    ("engine",),
)
"""Every module may import what stands in its own line or above."""

BESIDE = {
    "http": {"text", "http"},
    "supervisor": {"supervisor", "text"},
    "api": {"text", "http", "sched", "api", "kv"},
}
"""Packages that stand beside the ranks: what they may import besides the first three lines."""

FREE = {"cli", "testing", "bench"}
"""Join everything; nobody imports them, except that plugins may import testing."""

PUBLIC = ("api", "layers", "testing")
"""What builtin and plugins may import."""

TORCH_FREE = (
    *(*RANKS[0], "api", "sched", "text", "http", "cli", "supervisor", *RANKS[1], *RANKS[2]),
    *(f"bench.{name}" for name in ("workloads", "stats", "machine", "client", "load", "svg")),
)


def imports(file: Path, package: str | None = None) -> Iterator[tuple[int, str]]:
    """(line, module) of every import of a file, those inside functions and TYPE_CHECKING included."""
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: relative import"
            base = node.module or ""
            for alias in node.names:
                inner = f"{base}.{alias.name}".removeprefix("llmcore.")
                yield node.lineno, f"llmcore.{inner}" if base.startswith("llmcore") and inner in MODULES else base


def ours(file: Path) -> Iterator[tuple[int, str]]:
    """(line, name below llmcore) of what a file imports from llmcore."""
    for line, module in imports(file):
        if module == "llmcore" or module.startswith("llmcore."):
            yield line, module.removeprefix("llmcore").removeprefix(".")


def rank(name: str) -> int | None:
    """The line of RANKS a module stands in; the longest prefix counts."""
    lines = {prefix: index for index, line in enumerate(RANKS) for prefix in line}
    fitting = [prefix for prefix in lines if name == prefix or name.startswith(prefix + ".")]
    return lines[max(fitting, key=len)] if fitting else None


def allowed(importer: str, imported: str) -> bool:
    """Whether one core module may import another."""
    if imported == "" or top(importer) in FREE or importer == "":
        return top(imported) != "builtin"
    if top(imported) in (*FREE, "builtin", "api", "supervisor", "http") and top(imported) != top(importer):
        return top(importer) == "api" and imported.startswith("http")
    if top(importer) in BESIDE:
        beside = any(imported == name or imported.startswith(name + ".") for name in BESIDE[top(importer)])
        return beside or (rank(imported) is not None and rank(imported) <= 2)
    mine, its = rank(importer), rank(imported)
    assert mine is not None, f"llmcore.{importer} has no place in RANKS"
    return its is not None and its <= mine


def test_imports_point_one_way() -> None:
    wrong = [
        f"llmcore.{name}:{line} imports llmcore.{other}"
        for name in MODULES
        if top(name) != "builtin"
        for line, other in ours(MODULES[name])
        if not allowed(name, other)
    ]
    assert not wrong, "\n".join(wrong)


def test_built_ins_have_no_privilege() -> None:
    wrong = [
        f"llmcore.{name}:{line} imports llmcore.{other}"
        for name in MODULES
        if top(name) == "builtin"
        for line, other in ours(MODULES[name])
        if top(other) not in (*PUBLIC, "builtin")
    ]
    assert not wrong, "\n".join(wrong)


def test_plugins_import_public_modules_only() -> None:
    wrong = [
        f"{file.relative_to(ROOT)}:{line} imports llmcore.{other}"
        for file in PLUGINS
        for line, other in ours(file)
        if top(other) not in PUBLIC
    ]
    assert not wrong, "\n".join(wrong)


def test_core_imports_no_plugin() -> None:
    packages = {folder.name for folder in (ROOT / "plugins").glob("*/llmcore_*")} | {"llmcore_contrib_models"}
    assert packages
    wrong = [
        f"{name}:{line}" for name, file in MODULES.items() for line, module in imports(file) if top(module) in packages
    ]
    assert not wrong


def test_the_rule_can_fail() -> None:
    assert not allowed("specs", "errors")
    assert not allowed("sched.scheduler", "engine.runner")
    assert not allowed("http.front", "engine.engine")
    assert not allowed("http.front", "layers")
    assert not allowed("supervisor.supervisor", "http.worker")
    assert not allowed("plugins", "builtin.radix")
    assert not allowed("engine.llm", "api")
    assert not allowed("ops.linear", "weights.load")
    assert allowed("ops.linear", "weights.map")
    assert allowed("engine.engine", "sched.scheduler")


# --- without torch ---------------------------------------------------------------------------------------------

BLOCK = "import sys\nfor name in ('torch', 'transformers', 'triton'): sys.modules[name] = None\n"


def blocked(program: str, *argv: str) -> subprocess.CompletedProcess[str]:
    """A program in a process in which torch and transformers cannot be imported."""
    return subprocess.run([sys.executable, "-c", BLOCK + program, *argv], capture_output=True, text=True, check=False)


def test_listed_packages_import_no_torch() -> None:
    names = [f"llmcore.{name}" for name in MODULES if any(name == p or name.startswith(p + ".") for p in TORCH_FREE)]
    result = blocked(f"import importlib\nfor name in {names!r}: importlib.import_module(name)")
    assert result.returncode == 0, result.stderr[-2000:]


@pytest.mark.parametrize(
    "command",
    ["--help", "plugins", "hooks", "models", "modes --device cpu", "kernels", "kernels --explain --device sm90"],
)
def test_commands_that_list_need_no_torch(command: str) -> None:
    result = blocked("from llmcore.cli import main; main()", *command.split())
    assert (result.returncode, result.stderr) == (0, "")
