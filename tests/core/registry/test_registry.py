"""The registry: contributions with their plugins, what it finds among them, and hooks that observe or build."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from llmcore.api.errors import ConfigError, PluginError
from llmcore.api.models import LayerInfo
from llmcore.api.specs import (
    KernelSpec,
    KVLayoutSpec,
    ModelSpec,
    OpSpec,
    QuantMethodSpec,
    SchedulerSpec,
    WeightLoaderSpec,
)
from llmcore.config import Config, Plugins
from llmcore.registry.loader import build_registry, collect
from llmcore.registry.registry import Registry, known_plugins
from llmcore_devtools import registry_of
from sites import HEAD, SCHEDULER, Site, config

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(("version", "who"), [(0, "plugin-old"), (99, "llmcore-engine")])
def test_a_spec_for_another_interface_is_declined_and_found_in_the_error(site: Site, version: int, who: str) -> None:
    code = (
        HEAD + f"@hookimpl\ndef register_schedulers():\n    yield SchedulerSpec(name='s', make='m:m', api={version})"
    )
    site.install("old", code)
    registry = build_registry(config("old"))
    assert registry.specs(SchedulerSpec) == []
    assert f"written for plugin interface {version}" in registry.declined[0].reason
    with pytest.raises(ConfigError, match=f"plugin 'old' has one.*upgrade {who}"):
        registry.find(SchedulerSpec, "s")


def test_two_contributions_with_one_name_are_an_error_that_names_both(site: Site) -> None:
    site.install("a", SCHEDULER.format(name="same"))
    site.install("b", SCHEDULER.format(name="same"))
    with pytest.raises(PluginError, match=r"scheduler 'same' is also registered by plugin 'a'.*--plugins=-b"):
        build_registry(config())
    assert build_registry(config("-b")).find(SchedulerSpec, "same")


def test_kernels_of_different_ops_may_share_a_name(site: Site) -> None:
    code = HEAD + "@hookimpl\ndef register_kernels():\n"
    code += "".join(f"    yield KernelSpec(name='fast', op={op!r}, make='m:m')\n" for op in ("x", "y"))
    site.install("a", code)
    assert len(build_registry(config()).specs(KernelSpec)) == 2


def test_what_a_plugin_prints_is_not_in_what_a_command_prints(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.install("loud", "print('hello')\n" + SCHEDULER.format(name="s") + "    print('again')\n")
    assert build_registry(config()).failures == []
    assert capsys.readouterr() == ("", "hello\nagain\n")


# --- asking ----------------------------------------------------------------------------------------------------


def test_specs_carry_their_plugin_in_the_order_of_plugin_names(site: Site) -> None:
    site.install("z", SCHEDULER.format(name="a"))
    site.install("y", SCHEDULER.format(name="b"))
    found = build_registry(config()).specs(SchedulerSpec)
    assert [(spec.name, plugin.name) for spec, plugin in found] == [("b", "y"), ("a", "z")]


def test_find_lists_what_exists(site: Site) -> None:
    site.install("a", SCHEDULER.format(name="fcfs"))
    registry = build_registry(config())
    with pytest.raises(ConfigError, match=r"no scheduler 'fcsf'; known: fcfs. Did you mean fcfs\?"):
        registry.find(SchedulerSpec, "fcsf")
    with pytest.raises(ConfigError, match="no weight loader 'x'; known: none"):
        registry.find(WeightLoaderSpec, "x")


FAMILY = HEAD + "@hookimpl\ndef register_models():\n"
FAMILY += (
    "    yield ModelSpec(name='{name}', architectures=('Aa', 'Bb'), read_config='m:r', build='m:b', weights='m:w')\n"
)


def test_an_architecture_finds_its_family_and_two_claims_are_an_error(site: Site) -> None:
    site.install("one", FAMILY.format(name="one"))
    assert build_registry(config()).model_for(["Bb"]).name == "one"
    site.install("two", FAMILY.format(name="two"))
    registry = build_registry(config())
    with pytest.raises(ConfigError, match=r"Aa is claimed by one of plugin 'one', two of plugin 'two'; leave one out"):
        registry.model_for(["Aa"])
    assert build_registry(config("two")).model_for(["Aa"]).name == "two"


def test_an_unknown_architecture_names_the_plugin_that_brings_it(site: Site) -> None:
    registry = build_registry(config())
    with pytest.raises(ConfigError, match="unknown architecture 'LlamaForCausalLM': pip install plugin-llama"):
        registry.model_for(["LlamaForCausalLM"])
    with pytest.raises(ConfigError, match="'Nobody': no plugin is known to bring it; installed ones serve none"):
        registry.model_for(["Nobody"])
    with pytest.raises(ConfigError, match="names no architecture"):
        registry.model_for([])


def test_the_fingerprint_is_equal_in_every_process_and_changes_with_what_is_contributed(site: Site) -> None:
    code = HEAD + "@hookimpl\ndef register_kernels():\n    yield KernelSpec(name='k', op='o', make='m:m', "
    code += "when=Requires(dtypes=frozenset({{'f16', 'bf16', 'f32'}})), refuses=len, priority={priority})\n"
    path = site.file("prints.py", code.format(priority=50))
    here = build_registry(config(path)).fingerprint()
    assert here == build_registry(config(path)).fingerprint()
    program = "from llmcore.registry import loader; loader.BUILTINS = {}; loader.distributions = lambda: ()\n"
    program += "from llmcore.config import *\n"
    program += f"print(loader.build_registry(Config(plugins=Plugins(plugins=({path!r},)))).fingerprint())"
    for seed in ("1", "2"):
        out = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
        )
        assert out.stdout.strip() == here
    del sys.modules["llmcore_file_prints"]
    other = site.file("prints.py", code.format(priority=1000))  # another length: .pyc files have whole seconds
    assert build_registry(config(other)).fingerprint() != here


# --- hooks that observe or build -------------------------------------------------------------------------------


def test_observing_hooks_reach_every_plugin_and_one_that_raises_is_logged(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    site.install("bad", HEAD + "@hookimpl\ndef on_request_finished(record):\n    raise ValueError('boom')\n")
    site.install("good", HEAD + "seen = []\n@hookimpl\ndef on_request_finished(record):\n    seen.append(record)\n")
    registry = build_registry(config())
    with caplog.at_level(logging.ERROR):
        registry.call("on_request_finished", record="r")
    assert sys.modules["dist_plugin_good"].seen == ["r"]
    assert "plugin 'bad' (plugin-bad 1.0) failed in on_request_finished" in caplog.text
    assert "boom" in caplog.text


def test_a_config_error_at_startup_passes_and_nothing_else_does(site: Site) -> None:
    site.install("a", HEAD + "@hookimpl\ndef on_startup(config):\n    raise ConfigError(config)\n")
    site.install("b", HEAD + "@hookimpl\ndef on_startup():\n    raise ValueError('logged')\n")
    registry = build_registry(config())
    with pytest.raises(ConfigError, match="no such port"):
        registry.call("on_startup", config="no such port")
    build_registry(config("b")).call("on_startup", config="no such port")


HEARS = """
heard = []

@hookimpl
def on_startup():
    heard.append("start")

@hookimpl
def on_shutdown():
    heard.append("end")
"""
REFUSES = HEARS.replace('heard.append("start")', 'raise ConfigError("the port is odd")')


def test_who_heard_of_a_start_hears_of_its_end_once(site: Site) -> None:
    site.install("a", HEAD + HEARS)
    heard = []
    with pytest.raises(KeyError), build_registry(config()).lifetime(config()):
        heard += sys.modules["dist_plugin_a"].heard
        raise KeyError
    assert (heard, sys.modules["dist_plugin_a"].heard) == (["start"], ["start", "end"])


def test_a_start_that_a_plugin_refuses_is_over_for_those_before_it(site: Site) -> None:
    site.install("a", HEAD + HEARS)
    site.install("b", HEAD + REFUSES)
    site.install("c", HEAD + HEARS)
    with pytest.raises(ConfigError, match="the port is odd"), build_registry(config()).lifetime(config()):
        raise AssertionError("it started")
    assert [sys.modules[f"dist_plugin_{name}"].heard for name in "abc"] == [["start", "end"], ["end"], []]


class Layer(str):
    named_parameters = ()  # all that the registry looks at


def test_layers_pass_through_every_plugin_in_the_order_of_names(site: Site) -> None:
    wrap = HEAD + "@hookimpl\ndef build_layer(layer, info):\n    return type(layer)(f'{name}({{layer}})')\n"
    site.install("b", wrap.format(name="b"))
    site.install("a", wrap.format(name="a"))
    site.install("none", HEAD + "@hookimpl\ndef build_layer(layer):\n    return None\n")
    info = LayerInfo("layers.0", 0, None)  # type: ignore[arg-type]
    assert build_registry(config()).wrap_layer(Layer("x"), info) == "b(a(x))"
    site.install("bad", HEAD + "@hookimpl\ndef build_layer(layer):\n    raise ValueError('boom')\n")
    with pytest.raises(PluginError, match=r"plugin 'bad' failed in build_layer of 'layers.0': ValueError: boom"):
        build_registry(config()).wrap_layer(Layer("x"), info)


def test_a_layer_that_is_no_module_names_its_plugin(site: Site) -> None:
    site.install("wrapping", HEAD + "@hookimpl\ndef build_layer(layer):\n    return lambda x, step: x\n")
    registry = build_registry(config())
    info = LayerInfo("layers.0", 0, None)  # type: ignore[arg-type]
    with pytest.raises(PluginError, match=r"plugin 'wrapping' failed in build_layer .* returned a function"):
        registry.wrap_layer(object(), info)


def test_a_hook_that_raises_at_every_request_fills_no_log_with_tracebacks(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    site.install("noisy", HEAD + "@hookimpl\ndef on_request_finished(record):\n    raise ValueError('boom')\n")
    registry = build_registry(config())
    for _ in range(3):
        registry.call("on_request_finished", record=None)
    assert [bool(record.exc_info) for record in caplog.records] == [True, False, False]
    assert all("'noisy'" in record.message and "boom" in record.message for record in caplog.records)


# --- known plugins ------------------------------------------------------------------------------------------------


def test_known_plugins_are_those_of_this_tree() -> None:
    dists = {
        tomllib.loads(file.read_text())["project"]["name"]
        for file in (*ROOT.glob("plugins/*/pyproject.toml"), ROOT / "contrib_models" / "pyproject.toml")
    }
    models = registry_of().specs(ModelSpec)
    brought = {name: plugin.dist for spec, plugin in models for name in spec.architectures if plugin.dist in dists}
    for kind in (OpSpec, KVLayoutSpec, QuantMethodSpec):
        brought |= {spec.name: plugin.dist for spec, plugin in registry_of().specs(kind) if plugin.dist in dists}
    assert known_plugins() == brought, "run `python scripts/generate_docs.py`"
    assert known_plugins()["LlamaForCausalLM"] == "plugin-llama"


def test_known_plugins_are_package_data() -> None:
    packaged = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["llmcore"]
    assert "*.json" in packaged
    assert json.loads((ROOT / "core" / "llmcore" / "registry" / "known_plugins.json").read_text()) == known_plugins()


def test_ops_and_layouts_of_a_plugin_that_is_left_out_name_it() -> None:
    without = registry_of("-deepseek")
    for kind, name in ((OpSpec, "attn.mla.decode"), (KVLayoutSpec, "mla-latent")):
        with pytest.raises(ConfigError, match=f"{name}'; plugin-deepseek, which is not active, brings it"):
            without.find(kind, name)
        assert registry_of().find(kind, name)


def test_an_unknown_architecture_says_what_to_install() -> None:
    with pytest.raises(ConfigError, match="unknown architecture 'LlamaForCausalLM': pip install plugin-llama"):
        Registry(()).model_for(["LlamaForCausalLM"])


def test_a_plugin_that_failed_is_part_of_the_answer(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import module_that_is_absent")
    registry = collect(Config(plugins=Plugins(plugins=(str(tmp_path / "broken.py"), "-llama"))))
    with pytest.raises(ConfigError, match=r"plugin 'broken' .* failed in import: .*: pip install plugin-llama"):
        registry.model_for(["LlamaForCausalLM"])
