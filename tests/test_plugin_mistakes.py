"""Mistakes that plugin authors make: each is named where it happens, with its plugin, and harms nobody else."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from llmcore.config import Config, Plugins, make_config
from llmcore.errors import PluginError
from llmcore.models import LayerInfo
from llmcore.plugins import collect, made
from llmcore.registry import Registry
from llmcore.specs import OptionSpec, Requires, SchedulerSpec
from llmcore.testing import check_plugin, registry_of

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
        ("@hookimpl\ndef register_options():\n    yield OptionSpec(name='port')\n", "Option port exists already"),
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
        registry.warn()
    assert "plugin 'early': mode 'm' is written for plugin interface 99" in caplog.text
    with pytest.raises(AssertionError, match="written for plugin interface 99, this core speaks"):
        check_plugin(registry, "early")


def test_sets_lists_and_tuples_may_say_what_a_kernel_requires() -> None:
    listed = Requires(dtypes=["f32"], layouts={"token"}, shape={"size": (64, 128)})  # type: ignore[arg-type]
    assert listed == Requires(
        dtypes=frozenset({"f32"}), layouts=frozenset({"token"}), shape={"size": frozenset({64, 128})}
    )


def test_a_layer_that_is_no_module_names_its_plugin(tmp_path: Path) -> None:
    registry = written(tmp_path, "wrapping", "@hookimpl\ndef build_layer(layer):\n    return lambda x, step: x\n")
    info = LayerInfo("layers.0", 0, None)  # type: ignore[arg-type]
    with pytest.raises(PluginError, match=r"plugin 'wrapping' failed in build_layer .* returned a function"):
        registry.wrap_layer(object(), info)


def test_a_hook_that_raises_at_every_request_fills_no_log_with_tracebacks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    registry = written(
        tmp_path, "noisy", "@hookimpl\ndef on_request_finished(record):\n    raise ValueError('boom')\n"
    )
    for _ in range(3):
        registry.call("on_request_finished", record=None)
    assert [bool(record.exc_info) for record in caplog.records] == [True, False, False]
    assert all("'noisy'" in record.message and "boom" in record.message for record in caplog.records)


def test_a_policy_that_cannot_be_made_names_its_plugin(tmp_path: Path) -> None:
    registry = written(
        tmp_path, "policy", SCHEDULERS.replace("        pass", "        raise ValueError('no')") + "        pass\n"
    )
    with pytest.raises(PluginError, match=r"scheduler 'mine' of plugin 'policy' failed to start: ValueError: no; "):
        made(registry, SchedulerSpec, "mine", None)


def test_options_of_several_values_are_tuples_everywhere() -> None:
    tags = OptionSpec(name="tags", multiple=True)
    assert make_config([tags]).plugin_options == {"tags": ()}
    assert make_config([tags], tags=["a", "b"]).plugin_options == {"tags": ("a", "b")}
    assert Config(plugin_options={"tags": ["a", "b"]}).plugin_options == {"tags": ("a", "b")}


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
    with pytest.raises(AssertionError, match=f"mine would be overruled: {message}"):
        check_plugin(registry_of(str(path)), "policy")


def tokenizer_file(folder: Path, old: str, new: str) -> Path:
    """The example of a tokenizer with one mistake in it."""
    text = (Path(__file__).parents[1] / "docs" / "examples" / "register_tokenizers.py").read_text()
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
