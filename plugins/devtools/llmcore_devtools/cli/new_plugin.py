"""`llmcore plugins new`: a package for one hook, from that hook's example. Its tests pass without a change."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import click
from llmcore import __version__
from llmcore.api.errors import ConfigError
from llmcore.api.hookspecs import HOOKS
from llmcore.registry.loader import available

_IRREGULAR: Mapping[str, str] = {
    "register_models": "family",
    "register_quant_methods": "quant",
    "register_output_parsers": "parser",
    "build_layer": "layer",
}


def _kind(hook: str) -> str:
    """The authors' word for a hook's contribution."""
    return _IRREGULAR.get(hook) or hook.removeprefix("register_").removesuffix("s").replace("_", "-")


KINDS: Mapping[str, str] = {
    **{_kind(hook): hook for hook in HOOKS if not hook.startswith("on_")},
    **{hook.replace("_", "-"): hook for hook in HOOKS if hook.startswith("on_")},
}
"""Value of --kind -> hook. Every hook has one."""

_POST = "curl -H 'Content-Type: application/json' http://127.0.0.1:8000"

_USES: Mapping[str, str] = {
    "register_models": "llmcore serve --model_dir PATH_TO_AN_ARCEE_MODEL",
    "register_ops": "llmcore kernels {ident} --explain",
    "register_kernels": "llmcore kernels rms_norm --explain --dtype f32\nllmcore kernels rms_norm --bench --dtype f32",
    "register_modes": "llmcore modes\nllmcore serve --mode {name} --model_dir MODEL",
    "register_devices": "llmcore testserver --device {name}",
    "register_schedulers": "llmcore testserver --scheduler {name}",
    "register_length_estimators": "llmcore testserver --length_estimator {name}",
    "register_kv_managers": "llmcore testserver --kv_manager {name}",
    "register_output_parsers": "llmcore serve --tool_call_parser {name} --model_dir MODEL",
    "register_logits_processors": "llmcore testserver\n"
    + _POST
    + """/v1/completions -d '{{"prompt": "Is it so?", "logits_processors": """
    + """[{{"name": "{name}", "args": {{"texts": ["yes", "no"]}}}}]}}'""",
    "register_dialects": "llmcore testserver\n" + _POST + """/{name} -d '{{"text": "Once", "tokens": 8}}'""",
    "register_commands": "llmcore {name} you",
    "register_options": "llmcore testserver --{ident}_layers 2",
}
"""Hook -> commands that use its contribution. Other contributions appear in `llmcore plugins`."""

_SAMPLES: Mapping[str, str] = {
    "register_quant_methods": '    config = {"quantization_config": {"quant_method": "int8_rows"}}\n'
    '    (tmp_path / "config.json").write_text(json.dumps(config))\n'
    '    tensors = {"w.weight": np.ones((3, 2), np.int8), "w.weight_scale": np.ones(3, np.float32)}\n'
    '    save_file(tensors, tmp_path / "model.safetensors")\n',
    "register_tokenizers": '    (tmp_path / "bytes.tokenizer").touch()\n',
    "register_weight_loaders": '    (tmp_path / "config.json").write_text(\'{"architectures": ["Any"]}\')\n'
    '    np.save(tmp_path / "lm_head.weight.npy", np.ones((3, 2), np.float32))\n',
}
"""Hook that reads files -> lines of a test that make a sample in `tmp_path`."""


@dataclass(frozen=True)
class Names:
    """The names of a new plugin: its distribution, the plugin, an identifier, its module."""

    dist: str
    plugin: str
    ident: str
    module: str


def names_of(dist: str) -> Names:
    """The names for `dist`: `plugin-my-thing` and `my-thing` both give the plugin `my-thing` in `llmcore_my_thing`.

    Raises ConfigError for a name that pip would refuse, and for the name of an installed plugin.
    """
    if not re.fullmatch(r"[A-Za-z]([A-Za-z0-9._-]*[A-Za-z0-9])?", dist):
        raise ConfigError(f"{dist!r} is no name of a distribution; use letters, digits and -, as in my-plugin")
    plugin = re.sub(r"[-_.]+", "-", dist).lower()
    plugin = re.sub(r"^(llmcore-|plugin-)+(?=[a-z])", "", plugin)
    taken = {info.name: info.dist for info in available()}
    if plugin in taken:
        raise ConfigError(f"there is a plugin {plugin!r} already, of {taken[plugin]}; choose another name")
    ident = plugin.replace("-", "_")
    return Names(dist, plugin, ident, f"llmcore_{ident}")


@click.command("new")
@click.argument("name")
@click.option("--kind", type=click.Choice(list(KINDS)), required=True, help="What the plugin brings.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("."),
    help="Folder to write the package into (default: this one).",
)
def new(name: str, kind: str, out: Path) -> None:
    """Write a plugin's package: code, entry point, test, README.

    NAME: of the distribution, and of the folder that is made. The code is the example that docs/hooks.md has for the
    hook; the test runs its conformance check, and passes as written.
    """
    names, folder = names_of(name), out / name
    if folder.exists():
        raise ConfigError(f"{folder} exists; nothing was written. Give another NAME, or --out")
    files = dict(package(names, kind))
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    for path in files:
        click.echo(folder / path)
    click.echo(f"next: cd {folder} && pip install -e '.[test]' && pytest")


def package(names: Names, kind: str) -> Iterator[tuple[str, str]]:
    """(path, text) of every file of a new plugin."""
    hook = KINDS[kind]
    code = renamed(_example(hook), hook, names)
    parts = split(code)
    if parts is None:
        yield f"{names.module}.py", code
    else:
        yield f"{names.module}/__init__.py", parts[0]
        yield f"{names.module}/{_PART}.py", parts[1]
    yield "pyproject.toml", _pyproject(names, kind, code, single=parts is None)
    yield f"test_{names.ident}.py", _test(names, hook)
    yield "README.md", _readme(names, kind, single=parts is None)


def _example(hook: str) -> str:
    """The text of docs/examples/<hook>.py; scripts/generate_docs.py copies it into the package."""
    text = resources.files("llmcore_devtools").joinpath("plugin_templates.json").read_text(encoding="utf-8")
    return "\n".join(json.loads(text)[hook]) + "\n"


def renamed(code: str, hook: str, names: Names) -> str:
    """The example, registering under the new plugin's name, so that two new plugins never clash."""
    code = code.replace('"my_plugin"', f'"{names.module}"').replace(f"./{hook}.py", f"./{names.module}.py")
    if hook == "register_options":
        return re.sub(r"\bprobe(?=_)", names.ident, code)
    found = re.search(r'Spec\(\s*name="([^"]+)"', code) or re.search(r'\bname="([^"]+)"', code)
    if hook.startswith("register_") and found:
        new_name = names.ident if hook == "register_ops" else names.plugin
        before = rf'("/?|`(?:POST /|--\w+ |llmcore ))(?:{re.escape(found[1])})'
        code = re.sub(before + r'(?=["\s`])', rf"\g<1>{new_name}", code)
    return code


_PART = "code"
"""The module beside the hooks, for code that imports torch."""


def split(code: str) -> tuple[str, str] | None:
    """(hook module, code module) of an example that imports torch, which a hook module must not do; else None."""
    tree = ast.parse(code)
    heads = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    if not any("torch" in ast.unparse(node) for node in heads):
        return None
    lines = code.splitlines()
    hooks = [node for node in tree.body if isinstance(node, ast.FunctionDef) and _is_hook(node)]
    api = next(node for node in heads if isinstance(node, ast.ImportFrom) and node.module == "llmcore.api")
    first = (ast.get_docstring(tree) or "").splitlines()[0]
    texts = ["\n".join(lines[node.decorator_list[0].lineno - 1 : node.end_lineno]) for node in hooks]
    theirs = {name.id for node in hooks for name in ast.walk(node) if isinstance(name, ast.Name)}
    imported = [alias.name for alias in api.names]
    ours = ", ".join(name for name in imported if name in theirs)
    code_uses = ", ".join(name for name in imported if name not in theirs)
    hook_module = [f'"""{first}\n\nNo torch here: what a spec names is imported when it was chosen.\n"""', ""]
    hook_module += [
        f"from llmcore.api import {ours}",
        "",
        "",
        "\n\n\n".join(texts).replace("__name__}:", f"__name__}}.{_PART}:"),
    ]
    kept = [line for number, line in enumerate(lines, 1) if not any(_within(number, node) for node in hooks)]
    body = "\n".join(kept).replace(
        "\n".join(lines[api.lineno - 1 : api.end_lineno]), f"from llmcore.api import {code_uses}"
    )
    body = re.sub(r'\A""".*?"""', f'"""{first}"""', body, count=1, flags=re.DOTALL)
    return "\n".join(hook_module) + "\n", re.sub(r"\n{4,}", "\n\n\n", body) + "\n"


def _is_hook(node: ast.FunctionDef) -> bool:
    return any(ast.unparse(decorator) == "hookimpl" for decorator in node.decorator_list)


def _within(number: int, node: ast.FunctionDef) -> bool:
    return node.decorator_list[0].lineno <= number <= (node.end_lineno or 0)


def _requires(code: str) -> Iterator[str]:
    """The distributions of llmcore that `code` imports."""
    yield "llmcore-engine"
    if "llmcore_server" in code:
        yield "llmcore-server"


def _pyproject(names: Names, kind: str, code: str, single: bool) -> str:
    major, minor = (int(part) for part in __version__.split(".")[:2])
    versions = f">={major}.{minor},<{major}.{minor + 1}"
    modules = "py-modules" if single else "packages"
    return f"""[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "{names.dist}"
version = "0.1.0"
description = "A plugin of llmcore: {kind}"
readme = "README.md"
requires-python = ">=3.11"
dependencies = [{", ".join(f'"{dist}{versions}"' for dist in _requires(code))}]

[project.optional-dependencies]
test = ["llmcore-devtools{versions}"]

[project.entry-points.llmcore]
{names.plugin} = "{names.module}"

[tool.setuptools]
{modules} = ["{names.module}"]
"""


def _test(names: Names, hook: str) -> str:
    sample = _SAMPLES.get(hook, "")
    first = "import json\n\n" if "json.dumps" in sample else ""
    first += "import numpy as np\n" if "np." in sample else ""
    last = "from safetensors.numpy import save_file\n" if "save_file" in sample else ""
    arguments = "tmp_path" if sample else ""
    samples = ", [tmp_path]" if sample else ""
    return f'''"""Install the plugin first: `pip install -e '.[test]'`"""

{first}from llmcore_devtools import check_plugin, registry_of
{last}

def test_what_it_brings_keeps_the_contracts({arguments}):
{sample}    checked = check_plugin(registry_of("{names.plugin}"), "{names.plugin}"{samples})
    assert checked["{hook}"] > 0
'''


def _readme(names: Names, kind: str, single: bool) -> str:
    use = _USES.get(KINDS[kind], "").format(name=names.plugin, ident=names.ident)
    shown = "\n".join(filter(None, ("pip install -e '.[test]'", "pytest", "llmcore plugins", use)))
    alone = f"\nNot installed, for a try: `--plugins ./{names.module}.py`.\n" if single else ""
    if "testserver" in use:
        alone += (
            "\n`testserver` has a model without weights; `llmcore serve --model_dir MODEL` takes the same options.\n"
        )
    where = (
        f"`{names.module}.py`"
        if single
        else f"`{names.module}/`: the hooks in `__init__.py`, the rest in `{_PART}.py`"
    )
    return f"""# {names.dist}

A plugin of llmcore: {kind}, by the hook `{KINDS[kind]}`. Its code is in {where}.

```console
{shown}
```
{alone}"""
