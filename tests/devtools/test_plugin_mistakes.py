"""Mistakes that plugin authors make: each is named where it happens, with its plugin, and harms nobody else."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
from llmcore.api.errors import LlmcoreError, PluginError
from llmcore.api.specs import SchedulerSpec
from llmcore.config import Config, Plugins
from llmcore.registry.loader import build_registry, collect, made
from llmcore.registry.registry import Registry
from llmcore_devtools import Nonconformance, check_plugin, registry_of

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
HEAD = "from llmcore.api import *\nfrom llmcore.api import hookimpl\n"

SCHEDULERS = """
import numpy as np
from llmcore.api.sched import Decision

@hookimpl
def register_schedulers():
    yield SchedulerSpec(name="mine", make=f"{__name__}:Mine")

class Mine:
    def __init__(self, limits):
        pass

    def plan(self, view):
"""


def written(folder: Path, name: str, body: str) -> Registry:
    """The registry with a plugin file, which must not stop the others."""
    path = folder / f"{name}.py"
    path.write_text(HEAD + body)
    return collect(Config(plugins=Plugins(plugins=(str(path),))))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def register_modes():\n    return []\n", "register_modes: not marked with @hookimpl"),
        ("x = 1\n", "it has no hook: mark its functions with @hookimpl"),
        (
            "@hookimpl\ndef register_modes():\n    return ModeSpec(name='m')\n",
            "one ModeSpec; yield it, or return a list",
        ),
        (
            "@hookimpl\ndef register_models():\n"
            "    yield ModelSpec(name='m', architectures='Foo', read_config='', build='', weights='')\n",
            "architectures is one string, 'Foo'",
        ),
        (
            "@hookimpl\ndef register_kernels():\n"
            "    yield KernelSpec(op='linear', name='k', make='m:m', when=Requires(dtypes={'fp32'}))\n",
            "dtypes: fp32 is none of f32, f16, bf16",
        ),
        (
            "@hookimpl\ndef register_options():\n    yield OptionSpec(name='mem_fraction')\n",
            "Option mem_fraction exists already",
        ),
        (
            "@hookimpl\ndef register_modes():\n    yield ModeSpec(name='m')\n    yield ModeSpec(name='m')\n",
            "rename one, or leave it out with --plugins=-mistaken",
        ),
    ],
)
def test_a_mistake_is_a_failure_of_its_plugin_alone(tmp_path: Path, body: str, message: str) -> None:
    registry = written(tmp_path, "mistaken", body)
    (failure,) = registry.failures
    assert "plugin 'mistaken' (mistaken.py)" in str(failure)
    assert message in str(failure)
    assert {"ops", "fcfs"} <= {info.name for info in registry.plugins}


def test_what_is_not_used_is_logged_with_the_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    registry = written(tmp_path, "early", "@hookimpl\ndef register_modes():\n    yield ModeSpec(name='m', api=99)\n")
    with caplog.at_level(logging.WARNING):
        build_registry(Config(plugins=Plugins(plugins=(str(tmp_path / "early.py"),))))
    assert "plugin 'early': mode 'm' is written for plugin interface 99" in caplog.text
    with pytest.raises(AssertionError, match="written for plugin interface 99, this core speaks"):
        check_plugin(registry, "early")


def test_a_policy_that_cannot_be_made_names_its_plugin(tmp_path: Path) -> None:
    registry = written(
        tmp_path, "policy", SCHEDULERS.replace("        pass", "        raise ValueError('no')") + "        pass\n"
    )
    with pytest.raises(PluginError, match=r"scheduler 'mine' of plugin 'policy' failed to start: ValueError: no; "):
        made(registry, SchedulerSpec, "mine", None)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("raise KeyError('oops')", "plan\\(\\) raised KeyError"),
        (
            "return Decision(view.running[:1], np.minimum(view.remaining[:1], 2),"
            " [(r.index, 1) for r in view.waiting() if view.admit and view.fits(r)][:1])",
            "it cuts a prompt in pieces where prompts are computed whole",
        ),
        ("return Decision(view.running, view.remaining + 1)", "it computes more of a request than remains"),
        ("return Decision(view.running[:0], view.running[:0])", "it plans nothing though requests could run"),
    ],
)
def test_a_policy_that_core_would_overrule_does_not_conform(tmp_path: Path, plan: str, message: str) -> None:
    path = tmp_path / "policy.py"
    path.write_text(HEAD + SCHEDULERS + f"        {plan}\n")
    with pytest.raises(AssertionError, match=f"scheduler mine, random trace \\d: core would overrule it: .*{message}"):
        check_plugin(registry_of(str(path)), "policy")


def tokenizer_file(folder: Path, old: str, new: str) -> Path:
    """The example of a tokenizer with one mistake in it."""
    text = (EXAMPLES / "register_tokenizers.py").read_text()
    assert old in text
    (folder / "mine.py").write_text(text.replace(old, new))
    (folder / "bytes.tokenizer").touch()
    return folder / "mine.py"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("self.path = path", "self.pieces = [path]", "call it something else"),
        (
            "list(text.encode())",
            "[min(ord(c), 127) for c in text]",
            "give characters that the vocabulary lacks ids too",
        ),
    ],
)
def test_a_tokenizer_that_would_fail_in_a_server_is_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    file = tokenizer_file(tmp_path, old, new)
    with pytest.raises(AssertionError, match=message):
        check_plugin(registry_of(str(file)), "mine", [tmp_path])


KERNELS = """
import torch

@hookimpl
def register_kernels():
    where = Requires(device="cpu", dtypes={"f32"})
    yield KernelSpec(op="rms_norm", name="mine", make=f"{__name__}:make", when=where, tolerance=TOLERANCE)
    yield KernelSpec(op="rms_norm", name="far", make="nowhere:make", when=Requires(device="abacus"))

def make(context):
    def run(x, weight, eps):
        BODY
    return run
"""
RIGHT = "return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)"


def kernel_file(folder: Path, body: str, tolerance: str = "{}") -> Registry:
    path = folder / "mine.py"
    path.write_text(HEAD + KERNELS.replace("BODY", body).replace("TOLERANCE", tolerance))
    return registry_of(str(path))


def test_a_kernel_that_did_not_run_is_not_counted(tmp_path: Path) -> None:
    assert check_plugin(kernel_file(tmp_path, RIGHT), "mine") == {"register_kernels": 1}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (f"{RIGHT}.double()", "the kernel returns torch.float64, the reference torch.float32"),
        (RIGHT.replace("return", "out =") + "; x.copy_(out); return out", "the kernel writes into its input x"),
        (RIGHT.replace("return", "out =") + "; weight.add_(1); return out", "the kernel writes into its input weight"),
        ("return None", "sample 1: the kernel returns 0 tensors, the reference 1"),
        ("raise ValueError('no')", "ValueError: no"),
        (f"{RIGHT} * 1.01", r"sample 1, output 0: off by [\d.e-]+, allowed [\d.e-]+"),
    ],
)
def test_a_wrong_kernel_is_named_with_its_context(tmp_path: Path, body: str, message: str) -> None:
    with pytest.raises(Nonconformance) as failed:
        check_plugin(kernel_file(tmp_path, body), "mine")
    first, *others = failed.value.problems
    assert re.match(rf"register_kernels: kernel mine: rms_norm on cpu, f32, 1 tokens, size=\d+: .*{message}", first)
    assert re.search(r"\d+ contexts more are wrong$", others[-1])


def test_a_kernel_may_state_its_own_tolerance(tmp_path: Path) -> None:
    assert check_plugin(kernel_file(tmp_path, f"{RIGHT} * 1.01", "{'f32': 0.02}"), "mine")


def test_all_problems_of_a_plugin_are_listed(tmp_path: Path) -> None:
    path = tmp_path / "several.py"
    path.write_text(
        HEAD
        + """
@hookimpl
def register_modes():
    yield ModeSpec(name="empty")
    yield ModeSpec(name="lost", layouts={"token": "nowhere"}, kernels={"rms_norm": "fast", "linear": "faster"})

@hookimpl
def register_options():
    yield OptionSpec(name="colour", type=int, default="red")

@hookimpl
def on_shutdown():
    raise SystemExit(3)
"""
    )
    with pytest.raises(Nonconformance) as failed:
        check_plugin(registry_of(str(path)), "several")
    assert isinstance(failed.value.__cause__, LlmcoreError | SystemExit)
    assert [problem.partition(";")[0] for problem in failed.value.problems] == [
        "register_modes: mode empty: it pins nothing",
        "register_modes: mode lost: ConfigError: there is no kv layout 'nowhere'",
        "register_modes: mode lost: rms_norm has no kernel fast",
        "register_modes: mode lost: linear has no kernel faster",
        "register_options: option colour: it has no summary, its line of help",
        "register_options: option colour: the default 'red' is not of type int",
        "on_shutdown: SystemExit: 3",
    ]


@pytest.mark.parametrize("stated", [0.01, 0.6])
def test_a_layout_may_state_its_own_tolerance(tmp_path: Path, stated: float) -> None:
    code = (EXAMPLES / "register_kv_layouts.py").read_text()
    code = code.replace('name="token-f16",', f'name="token-f16", tolerance={stated},').replace(
        "new.half()", "(new * 0.5).half()"
    )
    (tmp_path / "coarse.py").write_text(code)
    registry = registry_of(str(tmp_path / "coarse.py"))
    if stated > 0.5:
        assert check_plugin(registry, "coarse") == {"register_kv_layouts": 1}
        return
    with pytest.raises(Nonconformance, match=r"layout token-f16: f32, granule 1: gather: off by .*, allowed"):
        check_plugin(registry, "coarse")


GRAMMAR = """
from llmcore.api.text import CallGrammar
from llmcore_parsers import grammars

@hookimpl
def register_output_parsers():
    yield OutputParserSpec(
        name="mine",
        kind="tool",
        make="llmcore_parsers.qwen:QwenToolParser",
        samples="llmcore_parsers.qwen:samples",
        grammar=f"{__name__}:grammar",
    )

def grammar(context):
    right = grammars.qwen_calls(context)
    BODY
"""


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return right", None),
        ("return dict(right.tags)", "grammar: it is a dict, not an api.text.CallGrammar"),
        ("return right.toys", "grammar: AttributeError"),
        (
            "return CallGrammar(rules=right.rules.replace('many', 'any'), opener='open', tags=right.tags)",
            "grammar: forced to calls: ",
        ),
        (
            "return CallGrammar(rules=right.rules.replace('arguments', 'args'), opener='open', tags=right.tags)",
            "grammar: forced to one call: the parser finds no whole call in '<tool_call>",
        ),
    ],
)
def test_a_broken_grammar_of_a_parser_is_named(tmp_path: Path, body: str, message: str | None) -> None:
    path = tmp_path / "calls.py"
    path.write_text(HEAD + GRAMMAR.replace("BODY", body))
    if message is None:
        assert check_plugin(registry_of(str(path)), "calls") == {"register_output_parsers": 1}
        return
    with pytest.raises(Nonconformance, match=re.escape(message)):
        check_plugin(registry_of(str(path)), "calls")


TEMPLATE = """
from llmcore.api.text import ChosenTemplate

@hookimpl
def register_output_parsers():
    yield OutputParserSpec(
        name="mine",
        kind="tool",
        make="llmcore_parsers.qwen:QwenToolParser",
        samples="llmcore_parsers.qwen:samples",
        template=f"{__name__}:TEMPLATE",
    )

TEMPLATE = ChosenTemplate('''SOURCE''')
"""
CALLS = (
    "{%- for c in m.tool_calls or () %}<tool_call>"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>{% endfor %}'
)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ tools }}{% for m in messages %}{{ m.content }}" + CALLS + "{% endfor %}", None),
        (
            "{% for m in messages %}{{ m.content }}" + CALLS + "{% endfor %}",
            "template: it does not show the request's",
        ),
        ("{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}", "template: the parser finds the calls []"),
        ("{% if %}", "template: "),
    ],
)
def test_a_broken_chat_template_of_a_parser_is_named(tmp_path: Path, source: str, message: str | None) -> None:
    path = tmp_path / "chats.py"
    path.write_text(HEAD + TEMPLATE.replace("SOURCE", source))
    if message is None:
        assert check_plugin(registry_of(str(path)), "chats") == {"register_output_parsers": 1}
        return
    with pytest.raises(Nonconformance, match=re.escape(message)):
        check_plugin(registry_of(str(path)), "chats")


INSIDE = """
import torch

@hookimpl
def build_layer(layer, info):
    layer.mlp.down_proj = REPLACED

class Scaled(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x, step):
        return self.inner(x, step)
"""


def test_build_layer_may_wrap_a_module_inside_the_block(tmp_path: Path) -> None:
    path = tmp_path / "inside.py"
    path.write_text(HEAD + INSIDE.replace("REPLACED", "Scaled(layer.mlp.down_proj)"))
    assert check_plugin(registry_of(str(path)), "inside") == {"build_layer": 2}
    path = tmp_path / "lost.py"
    path.write_text(HEAD + INSIDE.replace("REPLACED", "Scaled(lambda x, step: x)"))
    with pytest.raises(Nonconformance, match=r"build_layer: layers\.0: the wrapped layer lost its parameters"):
        check_plugin(registry_of(str(path)), "lost")
