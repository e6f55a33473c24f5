"""Imports point one way, plugins see the public modules only, and some things are never used. Read from the source."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CORE = ROOT / "core" / "llmcore"
PLUGINS = sorted(
    file
    for folder in (*(ROOT / "plugins").iterdir(), ROOT / "contrib_models", ROOT / "docs" / "examples")
    for file in folder.rglob("*.py")
    if "build" not in file.parts and not file.name.startswith("test_")
)

RANKS = (
    ("specs", "models"),
    (
        *("errors", "bridge", "subscribers", "protocols", "processors", "hookspecs", "config", "budget", "wire"),
        *("tallies", "overview", "bounds", "conversion"),
        *("child", "logs"),
        *("weights.map", "weights.dtypes"),
    ),
    ("registry", "plugins", "resolve", "modes", "inspect"),
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


def name_of(file: Path) -> str:
    """The module's name below llmcore: "sched.plan", "" for the package itself."""
    parts = file.relative_to(CORE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(file): file for file in sorted(CORE.rglob("*.py")) if file.name != "__main__.py"}


@cache
def parsed(file: Path) -> ast.Module:
    """A file's tree; most rules look at each."""
    return ast.parse(file.read_text())


@pytest.fixture(scope="module", autouse=True)
def forgotten() -> Iterator[None]:
    """All trees, once the rules have been looked after."""
    yield
    parsed.cache_clear()


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


def top(name: str) -> str:
    return name.partition(".")[0]


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
    "command", ["--help", "plugins", "hooks", "models", "modes", "kernels", "kernels --explain --device sm90"]
)
def test_commands_that_list_need_no_torch(command: str) -> None:
    result = blocked("from llmcore.cli import main; main()", *command.split())
    assert (result.returncode, result.stderr) == (0, "")


# --- what is never used ----------------------------------------------------------------------------------------

SOURCES = [
    file
    for folder in ("core", "plugins", "contrib_models", "scripts", "benchmarks", "docs")
    for file in sorted((ROOT / folder).rglob("*.py"))
    if "build" not in file.relative_to(ROOT).parts
]
MODULES_NEVER = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "multiprocessing"}
CALLS_NEVER = {
    *("eval", "exec", "compile", "__import__"),
    *("torch.load", "yaml.load", "yaml.full_load", "yaml.unsafe_load", "yaml.load_all", "os.fork", "os.system"),
}


def calls(tree: ast.AST) -> Iterator[tuple[int, str, ast.Call]]:
    """(line, dotted name, node) of every call by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (name := dotted(node.func)):
            yield node.lineno, name, node


def dotted(node: ast.expr) -> str:
    """ "a.b.c" of such an expression, "" of another."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def offences(tree: ast.Module) -> list[str]:
    """What a file does that nobody may."""
    found = []
    for node in ast.walk(tree):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        found += [f"line {node.lineno} imports {name}" for name in names if top(name) in MODULES_NEVER]
        if isinstance(node, ast.ImportFrom) and node.module == "torch":
            found += [f"line {node.lineno} imports torch.load" for alias in node.names if alias.name == "load"]
    for line, name, call in calls(tree):
        if name in CALLS_NEVER or re.search(r"_object(_list)?$|_pyobj$", name.rpartition(".")[2]):
            found.append(f"line {line} calls {name}")
        if any(k.arg == "allow_pickle" and ast.unparse(k.value) != "False" for k in call.keywords):
            found.append(f"line {line} allows pickles")
        if any(k.arg == "trust_remote_code" and ast.unparse(k.value) == "True" for k in call.keywords):
            found.append(f"line {line} trusts code from elsewhere without being asked to")
    found += [f"line {line} compares a secret in time that depends on it" for line in compared_secrets(tree)]
    return found


SECRETS = re.compile(r"(?i)(^|_)(api_keys?|secrets?|passwords?|authorization|bearer|digests?)($|_)")


def compared_secrets(tree: ast.AST) -> Iterator[int]:
    """Lines of `==`, `!=` and `in` with a name that says that it holds a secret."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and any(
            isinstance(op, (ast.Eq, ast.NotEq, ast.In, ast.NotIn)) for op in node.ops
        ):
            sides = [node.left, *node.comparators]
            names = [side.attr if isinstance(side, ast.Attribute) else getattr(side, "id", "") for side in sides]
            if any(SECRETS.search(name) for name in names):
                yield node.lineno


def test_nothing_is_unpickled_or_evaluated() -> None:
    wrong = [f"{file.relative_to(ROOT)}, {offence}" for file in SOURCES for offence in offences(parsed(file))]
    assert not wrong, "\n".join(wrong)


def test_that_rule_can_fail() -> None:
    wrong = ("import pickle", "from multiprocessing import Queue", "eval('1')", "torch.load(p)", "yaml.load(f)")
    wrong += ("dist.all_gather_object(a, b)", "np.load(p, allow_pickle=True)", "from torch import load")
    wrong += ("sock.recv_pyobj()", "load(x, trust_remote_code=True)", "given == self.api_key", "a in digests")
    assert all(offences(ast.parse(source)) for source in wrong)
    right = "model.eval()\nyaml.safe_load(f)\nspec.loader.exec_module(m)\nnp.load(p)\nre.compile('x')"
    assert not offences(ast.parse(right))


# --- what -O takes away, and what a clock that is set turns around ---------------------------------------------


def narrows(test: ast.expr) -> bool:
    """Whether an assert only tells the type checker what holds: python -O may take it away."""
    if isinstance(test, ast.BoolOp):
        return all(narrows(value) for value in test.values)
    if isinstance(test, ast.UnaryOp):
        return narrows(test.operand)
    if isinstance(test, ast.Call):
        return ast.unparse(test.func) in ("isinstance", "callable")
    return isinstance(test, ast.Compare) and all(isinstance(op, (ast.Is, ast.IsNot)) for op in test.ops)


SHIPPED = [file for file in SOURCES if file.is_relative_to(ROOT / "core") or file in PLUGINS]


def asserted(tree: ast.Module) -> Iterator[ast.Assert]:
    """What a file checks by assert. An invariant that only tests ask for, by a method of that name, may be."""
    asked = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "check"]
    aside = {id(node) for function in asked for node in ast.walk(function)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert) and id(node) not in aside and not narrows(node.test):
            yield node


def test_nothing_is_checked_by_assert() -> None:
    wrong = [
        f"{file.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
        for file in SHIPPED
        if not {"testing", "examples", "tests"} & set(file.parts)
        for node in asserted(parsed(file))
    ]
    assert not wrong, "\n".join(wrong)


WALL_CLOCK = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.datetime.now"}
STAMPS = {
    "core/llmcore/builtin/openai": "`created` of an answer",
    "core/llmcore/text/templates.py": "today's date, which templates ask for",
    "core/llmcore/http/admin": "when something was, for people",
    "core/llmcore/http/streaming/refusal.py": "the Date of an answer",
    "core/llmcore/supervisor/admin.py": "when the server was started, for people",
}


def test_timers_are_monotonic() -> None:
    """A clock that is set ends nothing early and keeps nothing for ever; only what people read has a date."""
    wrong = [
        f"{file.relative_to(ROOT)}:{line}"
        for file in SHIPPED
        if not any(str(file.relative_to(ROOT)).startswith(place) for place in STAMPS)
        for line, name, _ in calls(parsed(file))
        if name in WALL_CLOCK
    ]
    assert not wrong


ENVIRONMENT = re.compile(r"\bos\.(environb?|getenv|putenv|unsetenv)\b|from os import .*\b(environ|getenv)\b")


def test_only_config_reads_the_environment() -> None:
    places = [*(f for n, f in MODULES.items() if top(n) not in ("config", "testing")), *PLUGINS]
    wrong = [str(file.relative_to(ROOT)) for file in places if ENVIRONMENT.search(file.read_text())]
    assert not wrong


NAMED = re.compile(
    r"(?i)llama|mistral|mixtral|qwen|deepseek|gemma|smollm|falcon_?h|chatglm|internlm|\bphi[-_]?\d|"
    r"nvidia|cuda|rocm|\bamd\b|\bintel\b|\bascend|hopper|blackwell|ampere|\b[abh][12]00\b|\bsm_?\d{2}\b|\brtx"
)


GIVEN_NAMES = {
    ("layers.rope", "llama3"),
    *((name, "disable_cudagraph") for name in ("config.tree", "config.check", "engine.build")),
}
"""What Hugging Face's configs call something that families share, and an option of the servers we follow."""


def code_words(file: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of a file's names and strings, without comments and docstrings."""
    tree = parsed(file)
    docs = {
        node.body[0].lineno
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    with file.open("rb") as stream:
        for token in tokenize.tokenize(stream.readline):
            if token.type in (tokenize.NAME, tokenize.STRING) and token.start[0] not in docs:
                yield token.start[0], token.string


def test_core_names_no_family_vendor_or_gpu() -> None:
    wrong = [
        f"llmcore.{name}:{line}: {text[:60]}"
        for name, file in MODULES.items()
        if not name.startswith("builtin.devices")
        for line, text in code_words(file)
        if NAMED.search(text) and not any(name == n and word in text for n, word in GIVEN_NAMES)
    ]
    assert not wrong, "\n".join(wrong)


GUARDS = {"reraise_if_stopping", "_note"}
"""What asks whether an exception is this process's own end; a generation's `_note` does it for its handlers."""

OWN_WAYS = {
    "http.worker": "ends its process or thread, and says why",
    "http.admin.process": "ends its process or thread, and says why",
    "engine.process": "ends its process, and says why",
    "engine.local": "ends its thread, and tells who waits",
    "testing.conformance_scheduling": "raises it again",
}


def broad_handlers(tree: ast.Module, caught: str) -> Iterator[ast.ExceptHandler]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and isinstance(node.type, ast.Name) and node.type.id == caught:
            yield node


ANY_FAILURE = {
    *("http.app", "supervisor.push", "http.streaming.channel", "http.tls", "cli"),
    *("testing.fake_engine", "testing.clock_engine"),
}
"""Who may catch Exception: no plugin's code is called there."""


def unguarded(name: str) -> Iterator[str]:
    """Handlers of a module that let a native library's panic by, or keep the end of the process."""
    tree = parsed(MODULES[name])
    for node in broad_handlers(tree, "BaseException"):
        bare = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
        if not bare and not any(called.rpartition(".")[2] in GUARDS for _, called, _ in calls(node)):
            yield f"llmcore.{name}:{node.lineno}: call reraise_if_stopping first"
    for node in () if name in ANY_FAILURE else broad_handlers(tree, "Exception"):
        yield f"llmcore.{name}:{node.lineno}: catch BaseException, and call reraise_if_stopping"


def test_who_goes_on_after_a_plugins_failure_asks_the_one_place_that_knows_one() -> None:
    wrong = [line for name in MODULES if name not in OWN_WAYS for line in unguarded(name)]
    assert not wrong, "\n".join(wrong)
