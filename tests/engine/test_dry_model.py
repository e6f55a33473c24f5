"""`serve`, `plan`, `modes` and `kernels --explain` agree on which modes fit a model, and say the same of one that
does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from llmcore import LLM
from llmcore.cli import root
from llmcore.engine.mode_fit import mode_fit_of
from llmcore.errors import ConfigError
from llmcore.registry import Registry
from llmcore.specs import DeviceInfo, ModeSpec
from llmcore_devtools import registry_of

PLUGIN = """
from llmcore.api import KernelSpec, KVLayoutSpec, ModeSpec, Requires, hookimpl

@hookimpl
def register_kernels():
    yield KernelSpec(op="attn.gqa.decode", name="gpu", make="m:m", when=Requires(device="cuda"))
    yield KernelSpec(op="attn.gqa.decode", name="half", make="m:m", when=Requires(dtypes={"f16"}))
    yield KernelSpec(op="attn.gqa.decode", name="picky", make="m:m", refuses=lambda context: "it is Monday")

@hookimpl
def register_modes():
    yield ModeSpec(name="plain", kernels={"attn.gqa.decode": "torch"})
    yield ModeSpec(name="sampling", kernels={"sample": "torch"})
    yield ModeSpec(name="gpu", kernels={"attn.gqa.decode": "gpu"})
    yield ModeSpec(name="half", kernels={"attn.gqa.decode": "half"})
    yield ModeSpec(name="picky", kernels={"attn.gqa.decode": "picky"})
    yield ModeSpec(name="latent", kernels={"attn.mla.decode": "torch"})
    yield ModeSpec(name="elsewhere", layout="nowhere")
"""

MISFITS = {
    "gpu": "kernel gpu for attn.gqa.decode needs device cuda, has cpu",
    "half": "needs dtype f16, has f32",
    "picky": "it is Monday",
    "latent": "pins attn.mla.decode, which this model does not use",
    "elsewhere": "needs layout nowhere, which no plugin brings",
}
"""On a CPU, of a model with grouped attention in f32."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama without weights."""
    path = tmp_path_factory.mktemp("model")
    fields = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    fields |= {"num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 64, "rms_norm_eps": 1e-5}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32", **fields}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("plugin") / "moded.py"
    path.write_text(PLUGIN)
    return str(path)


@pytest.fixture(scope="module")
def registry(plugin: str) -> Registry:
    return registry_of(plugin, "llama")


def run(*args: str) -> str:
    result = CliRunner().invoke(root, args)
    if isinstance(result.exception, ConfigError):
        return str(result.exception)
    assert result.exit_code == 0, result.output
    return result.output


def test_modes_lists_what_fits_the_model(model: Path, plugin: str) -> None:
    args = ("modes", "--model", str(model), "--device", "cpu", "--json", "--plugins", plugin, "--plugins", "llama")
    rows = {row["name"]: row["misfit"] for row in json.loads(run(*args))}
    assert rows["plain"] is None and rows["sampling"] is None
    for name, why in MISFITS.items():
        assert why in rows[name], name


@pytest.mark.parametrize("mode", MISFITS)
def test_every_command_says_the_same_of_a_mode_that_does_not_fit(
    model: Path, plugin: str, registry: Registry, mode: str
) -> None:
    why = mode_fit_of(model, registry, DeviceInfo("cpu")).misfit(registry.find(ModeSpec, mode))
    settings = ("--plugins", plugin, "llama", "--mode", mode, "--load_format", "dummy", "--device", "cpu")
    planned = run("plan", str(model), *settings)
    listed = ("--plugins", plugin, "--plugins", "llama", "--mode", mode, "--device", "cpu")
    explained = run("kernels", "--explain", "--model", str(model), *listed)
    with pytest.raises(ConfigError) as served:
        LLM(str(model), plugins=[plugin, "llama"], mode=[mode], load_format="dummy", device="cpu")
    for said in (planned, explained, str(served.value)):
        assert f"--mode {mode} does not fit" in said and str(why) in said
        assert said.strip().endswith("modes that fit: plain, sampling.")


@pytest.mark.parametrize("mode", ["plain", "sampling"])
def test_a_mode_that_fits_serves(model: Path, plugin: str, mode: str) -> None:
    with LLM(str(model), plugins=[plugin, "llama"], mode=[mode], load_format="dummy", device="cpu") as llm:
        assert llm.config is not None


def test_a_mode_that_is_not_there_lists_what_fits_the_model(model: Path, plugin: str) -> None:
    with pytest.raises(ConfigError) as error:
        LLM(str(model), plugins=[plugin, "llama"], mode=["plainn"], load_format="dummy", device="cpu")
    said = str(error.value)
    assert said == "--mode plainn: there is no such mode; modes that fit: plain, sampling. Did you mean plain?"
