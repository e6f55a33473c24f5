"""What is never used: pickles, asserts, wall clocks, the environment, vendors' names. Read from the source."""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from source import MODULES, PACKAGES, PLUGINS, ROOT, parsed, top

pytestmark = pytest.mark.usefixtures("forgotten")

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


def calls(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str, ast.Call]]:
    """(line, dotted name, node) of every call by name."""
    for node in nodes:
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
    nodes = list(ast.walk(tree))
    for node in nodes:
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        found += [f"line {node.lineno} imports {name}" for name in names if top(name) in MODULES_NEVER]
        if isinstance(node, ast.ImportFrom) and node.module == "torch":
            found += [f"line {node.lineno} imports torch.load" for alias in node.names if alias.name == "load"]
    for line, name, call in calls(nodes):
        if name in CALLS_NEVER or re.search(r"_object(_list)?$|_pyobj$", name.rpartition(".")[2]):
            found.append(f"line {line} calls {name}")
        if any(k.arg == "allow_pickle" and ast.unparse(k.value) != "False" for k in call.keywords):
            found.append(f"line {line} allows pickles")
        if any(k.arg == "trust_remote_code" and ast.unparse(k.value) == "True" for k in call.keywords):
            found.append(f"line {line} trusts code from elsewhere without being asked to")
    found += [f"line {line} compares a secret in time that depends on it" for line in compared_secrets(nodes)]
    return found


SECRETS = re.compile(r"(?i)(^|_)(api_keys?|secrets?|passwords?|authorization|bearer|digests?)($|_)")


def compared_secrets(nodes: Iterable[ast.AST]) -> Iterator[int]:
    """Lines of `==`, `!=` and `in` with a name that says that it holds a secret."""
    for node in nodes:
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
        if not {"llmcore_devtools", "examples", "tests"} & set(file.parts)
        for node in asserted(parsed(file))
    ]
    assert not wrong, "\n".join(wrong)


WALL_CLOCK = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.datetime.now"}
STAMPS = {
    "plugins/openai/llmcore_openai": "`created` of an answer",
    "plugins/ollama/llmcore_ollama": "`created_at` of a line",
    "plugins/responses/llmcore_responses": "`created_at` and `completed_at` of an answer",
    "core/llmcore/text/templates.py": "today's date, which templates ask for",
    "plugins/server/llmcore_server/http/admin": "when something was, for people",
    "plugins/server/llmcore_server/http/streaming/tasks.py": "the Date of an answer",
    "plugins/server/llmcore_server/supervisor/processes.py": "when the server was started, for people",
    "core/llmcore/engine/engine.py": "when figures were taken, for people",
    "plugins/devtools/llmcore_devtools/fake_engine.py": "the same",
}


def test_timers_are_monotonic() -> None:
    """A clock that is set ends nothing early and keeps nothing for ever; only what people read has a date."""
    wrong = [
        f"{file.relative_to(ROOT)}:{line}"
        for file in SHIPPED
        if not any(str(file.relative_to(ROOT)).startswith(place) for place in STAMPS)
        for line, name, _ in calls(ast.walk(parsed(file)))
        if name in WALL_CLOCK
    ]
    assert not wrong


ENVIRONMENT = re.compile(r"\bos\.(environb?|getenv|putenv|unsetenv)\b|from os import .*\b(environ|getenv)\b")


def test_only_config_reads_the_environment() -> None:
    places = [
        *(f for n, f in MODULES.items() if top(n) != "config"),
        *(f for f in PLUGINS if "devtools" not in f.parts),
    ]
    wrong = [str(file.relative_to(ROOT)) for file in places if ENVIRONMENT.search(file.read_text())]
    assert not wrong


NAMED = re.compile(
    r"(?i)llama|mistral|mixtral|qwen|deepseek|gemma|smollm|falcon_?h|chatglm|internlm|\bphi[-_]?\d|"
    r"nvidia|cuda|rocm|\bamd\b|\bintel\b|\bascend|hopper|blackwell|ampere|\b[abh][12]00\b|\bsm_?\d{2}\b|\brtx"
)


GIVEN_NAMES = {
    ("layers.rope", "llama3"),
    *((name, "disable_cudagraph") for name in ("config.tree", "config.check", "engine.build", "engine.parts")),
    *(("config.foreign", word) for word in ("cuda", "CUDA_VISIBLE_DEVICES")),
}
"""What Hugging Face's configs call something that families share, and options of other servers."""


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
        if not name.startswith("builtin.devices") and NAMED.search(file.read_text())
        for line, text in code_words(file)
        if NAMED.search(text) and not any(name == n and word in text for n, word in GIVEN_NAMES)
    ]
    assert not wrong, "\n".join(wrong)


GUARDS = {"reraise_if_stopping", "_note"}
"""What asks whether an exception is this process's own end; a generation's `_note` does it for its handlers."""

HOSTS = {
    name: file
    for package in (
        "llmcore",
        "llmcore_server",
        "llmcore_openai",
        "llmcore_lightllm",
        "llmcore_tgi",
        "llmcore_route",
        "llmcore_devtools",
    )
    for name, file in PACKAGES[package].items()
}
"""Modules that call plugins, or run where plugins are called."""

OWN_WAYS = {
    "llmcore_server.http.worker": "ends its process, and says why",
    "llmcore_server.http.admin.process": "ends its process, and says why",
    "llmcore_server.http.streaming.server": "ends its process, and says why",
    "llmcore_server.child": "ends its process, and says why",
    "llmcore.engine.in_process": "ends its thread, and tells who waits",
    "llmcore_devtools.conformance_scheduling": "raises it again",
}


def broad_handlers(tree: ast.Module, caught: str) -> Iterator[ast.ExceptHandler]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and isinstance(node.type, ast.Name) and node.type.id == caught:
            yield node


ANY_FAILURE = {
    *(f"llmcore_server.{name}" for name in ("http.app", "http.streaming.channel", "http.tls")),
    *("llmcore.cli", "llmcore.text.templates", "llmcore_devtools.fake_engine", "llmcore_devtools.clock_engine"),
}
"""Who may catch Exception: no plugin's code is called there."""


def unguarded(name: str) -> Iterator[str]:
    """Handlers of a module that let a native library's panic by, or keep the end of the process."""
    tree = parsed(HOSTS[name])
    for node in broad_handlers(tree, "BaseException"):
        bare = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
        if not bare and not any(called.rpartition(".")[2] in GUARDS for _, called, _ in calls(ast.walk(node))):
            yield f"{name}:{node.lineno}: call reraise_if_stopping first"
    for node in () if name in ANY_FAILURE else broad_handlers(tree, "Exception"):
        yield f"{name}:{node.lineno}: catch BaseException, and call reraise_if_stopping"


def test_who_goes_on_after_a_plugins_failure_asks_the_one_place_that_knows_one() -> None:
    wrong = [line for name in HOSTS if name not in OWN_WAYS for line in unguarded(name)]
    assert not wrong, "\n".join(wrong)
