"""known_plugins.json: which distribution brings an architecture that nobody has installed."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from llmcore.api.errors import ConfigError
from llmcore.api.specs import ModelSpec
from llmcore.registry.registry import Registry, known_plugins
from llmcore_devtools import registry_of

ROOT = Path(__file__).resolve().parents[3]


def test_it_names_what_the_plugins_of_this_tree_bring() -> None:
    dists = {
        tomllib.loads(file.read_text())["project"]["name"]
        for file in (*ROOT.glob("plugins/*/pyproject.toml"), ROOT / "contrib_models" / "pyproject.toml")
    }
    brought = {
        architecture: plugin.dist
        for spec, plugin in registry_of().specs(ModelSpec)
        for architecture in spec.architectures
        if plugin.dist in dists
    }
    assert known_plugins() == brought, "run `python scripts/generate_docs.py`"
    assert known_plugins()["LlamaForCausalLM"] == "plugin-llama"


def test_it_is_package_data() -> None:
    packaged = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["llmcore"]
    assert "*.json" in packaged
    assert json.loads((ROOT / "core" / "llmcore" / "registry" / "known_plugins.json").read_text()) == known_plugins()


def test_an_unknown_architecture_says_what_to_install() -> None:
    with pytest.raises(ConfigError, match="unknown architecture 'LlamaForCausalLM': pip install plugin-llama"):
        Registry(()).model_for(["LlamaForCausalLM"])


def test_a_plugin_that_failed_is_part_of_the_answer(tmp_path: Path) -> None:
    from llmcore.config import Config, Plugins
    from llmcore.registry.loader import collect

    (tmp_path / "broken.py").write_text("import module_that_is_absent")
    registry = collect(Config(plugins=Plugins(plugins=(str(tmp_path / "broken.py"), "-llama"))))
    with pytest.raises(ConfigError, match=r"plugin 'broken' .* failed in import: .*: pip install plugin-llama"):
        registry.model_for(["LlamaForCausalLM"])
