"""Imports point one way, plugins see the public modules only, and what lists needs no torch. Read from the source."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from source import MODULES, PACKAGES, PLUGINS, ROOT, parsed, top

pytestmark = pytest.mark.usefixtures("forgotten")

RANKS = (
    ("api.specs",),
    tuple(
        f"api.{name}"
        for name in ("errors", "models", "balancing", "bridge", "protocols", "processors", "counters", "child_pool")
    ),
    ("api.hookspecs", "config", "weights.map"),
    ("registry",),
    ("ops",),
    ("layers",),
    ("weights", "kv", "sched", "text", "fleet"),
    ("engine",),
    ("cli",),
)
"""Every module may import what stands in its own line or above."""

REGISTRY = RANKS.index(("registry",))

FACADES = ("api", "api.balancing", "api.text", "api.sched", "api.engine", "api.cli", "api.child_pool")
"""The modules of `api` that plugins import. They show names of other rooms."""

SHOWN = ("text", "sched", "kv", "engine", "weights", "cli")
"""Beside the registry and the lines above it, what the facades may import."""

HOST = ("layers", "text", "cli.options", "cli.display", "weights.source")
"""What the server may import of core, beside the registry and the lines above it: it hosts the engine and text."""

DIALECTS = ("openai", "lightllm", "tgi", "responses", "messages", "ollama")

TORCH_FREE = ("api", "config", "registry", "fleet", "weights.map", "sched", "text", "cli", "engine.memory")
"""`api.engine` alone brings torch."""

SERVER_TORCH_FREE = ("http", "supervisor", "api", "listening", "messages", "serve", "plugin", "prometheus", "status")


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
    if imported == "" or importer == "":
        return True
    if importer in FACADES:
        return top(imported) in SHOWN or _below(imported, REGISTRY)
    mine = rank(importer)
    assert mine is not None, f"llmcore.{importer} has no place in RANKS"
    return _below(imported, mine)


def _below(imported: str, line: int) -> bool:
    its = rank(imported)
    return its is not None and its <= line


def _is(name: str, among: tuple[str, ...]) -> bool:
    return any(name == one or name.startswith(f"{one}.") for one in among)


def public(name: str, file: Path = ROOT) -> bool:
    """Whether built-ins and plugins may import a module of core. A folder `ops` has the modules of a plugin's ops."""
    rooms = ("layers", "fleet", "ops") if file.parent.name == "ops" else ("layers", "fleet")
    return name in ("", *FACADES) or top(name) in rooms


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
        if not public(other) and top(other) != "builtin"
    ]
    assert not wrong, "\n".join(wrong)


def _plugin(file: Path) -> str:
    """ "server" for a file of plugins/server, "" for one of no distribution there."""
    parts = file.relative_to(ROOT).parts
    return parts[1] if parts[0] == "plugins" else ""


def test_plugins_import_public_modules_only() -> None:
    wrong = [
        f"{file.relative_to(ROOT)}:{line} imports llmcore.{other}"
        for file in PLUGINS
        if _plugin(file) != "devtools"
        for line, other in ours(file)
        if not public(other, file)
        and not (_plugin(file) == "server" and (_is(other, HOST) or other == "" or _below(other, REGISTRY)))
    ]
    assert not wrong, "\n".join(wrong)


SERVERS_API = {
    **dict.fromkeys(DIALECTS, ("llmcore_server.api", "llmcore_server.settings")),
    "route": ("llmcore_server.listening",),
}
"""What a plugin may import of the server."""


def test_plugins_import_no_other_but_the_servers_api() -> None:
    """Devtools join everything, and tests alone import them."""
    wrong = []
    for file in PLUGINS:
        mine = _plugin(file)
        for line, module in imports(file):
            package = top(module)
            if not package.startswith("llmcore_") or mine in ("", "devtools") or package == f"llmcore_{mine}":
                continue
            if module not in SERVERS_API.get(mine, ()):
                wrong.append(f"{file.relative_to(ROOT)}:{line} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_core_imports_no_plugin() -> None:
    packages = {folder.name for folder in (ROOT / "plugins").glob("*/llmcore_*")} | {"llmcore_contrib_models"}
    assert packages
    wrong = [
        f"{name}:{line}" for name, file in MODULES.items() for line, module in imports(file) if top(module) in packages
    ]
    assert not wrong


def cycles(edges: Mapping[str, set[str]]) -> list[set[str]]:
    """Sets of modules that import each other, directly or not."""
    reached: dict[str, set[str]] = {}
    for start in edges:
        seen, todo = set[str](), [start]
        while todo:
            for other in edges[todo.pop()] - seen:
                seen.add(other)
                todo.append(other)
        reached[start] = seen
    found = [{one for one in reached[name] if name in reached[one]} for name in edges if name in reached[name]]
    return [group for index, group in enumerate(found) if group not in found[:index]]


@pytest.mark.parametrize("package", PACKAGES)
def test_modules_of_a_package_import_each_other_in_one_direction(package: str) -> None:
    modules = PACKAGES[package]
    edges: dict[str, set[str]] = {name: set() for name in modules}
    for name, file in modules.items():
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.ImportFrom) and node.module:
                inside = {f"{node.module}.{alias.name}" for alias in node.names} & set(modules)
                whole = len(inside) < len(node.names) and node.module in modules
                edges[name] |= inside | ({node.module} if whole else set())
            elif isinstance(node, ast.Import):
                edges[name] |= {alias.name for alias in node.names} & set(modules)
        edges[name].discard(name)
    assert not cycles(edges)


def test_the_rules_can_fail() -> None:
    assert not allowed("api.specs", "api.errors")
    assert not allowed("sched.scheduler", "engine.model_runner")
    assert not allowed("registry.loader", "builtin.radix")
    assert not allowed("config.tree", "api")
    assert not public("api.specs") and public("api.text")
    assert not public("ops.attention") and public("ops.attention", ROOT / "ops" / "mine.py")
    assert not allowed("engine.llm", "api")
    assert not allowed("engine.llm", "cli.options")
    assert not allowed("ops.linear", "weights.load")
    assert allowed("ops.linear", "weights.map")
    assert allowed("engine.engine", "sched.scheduler")
    assert not _is("engine.build", HOST) and not _is("cli.plan", HOST)
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == [{"b", "c"}]


# --- without torch ---------------------------------------------------------------------------------------------

BLOCK = "import sys\nfor name in ('torch', 'transformers', 'triton'): sys.modules[name] = None\n"


def blocked(program: str, *argv: str) -> subprocess.CompletedProcess[str]:
    """A program in a process in which torch and transformers cannot be imported."""
    return subprocess.run([sys.executable, "-c", BLOCK + program, *argv], capture_output=True, text=True, check=False)


def test_listed_packages_import_no_torch() -> None:
    names = [f"llmcore.{name}" for name in MODULES if _is(name, TORCH_FREE) and name != "api.engine"]
    server = PACKAGES["llmcore_server"]
    names += [name for name in server if _is(name.partition(".")[2], SERVER_TORCH_FREE)]
    names += [name for plugin in SERVERS_API for name in PACKAGES[f"llmcore_{plugin}"]]
    result = blocked(f"import importlib\nfor name in {names!r}: importlib.import_module(name)")
    assert result.returncode == 0, result.stderr[-2000:]


@pytest.mark.parametrize(
    "command",
    ["--help", "plugins", "hooks", "models", "modes --device cpu", "kernels", "kernels --explain --device sm90"],
)
def test_commands_that_list_need_no_torch(command: str) -> None:
    result = blocked("from llmcore.cli import main; main()", *command.split())
    assert (result.returncode, result.stderr) == (0, "")
