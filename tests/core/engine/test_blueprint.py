"""A model that is built without weights: why kernels declined, its granules, the modes that it can be served with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from llmcore.api.errors import ConfigError
from llmcore.api.models import AttnSpec
from llmcore.api.specs import DeviceInfo, ModeSpec, OpContext
from llmcore.cli import root
from llmcore.engine.blueprint import DryBuild, blueprint_at, fallbacks, settle_granules
from llmcore.engine.llm import LLM
from llmcore.registry.modes import Pins
from llmcore.registry.registry import Registry
from llmcore.registry.resolve import Resolution, candidates_for, resolve
from llmcore_devtools import fake_answer, registry_of
from llmcore_devtools.fake_files import read_config

HALF = """
from llmcore.api import KernelSpec, Requires, hookimpl

@hookimpl
def register_kernels():
    yield KernelSpec(op="attn.merge", name="half", make="x:y", when=Requires(device="gpu", dtypes={"f16"}))
    yield KernelSpec(op="attn.merge", name="other", make="x:y", when=Requires(device="npu"))
"""


def merging(registry: Registry, device: str) -> Resolution:
    context = OpContext(op="attn.merge", device=DeviceInfo(device), dtype="f32")
    return resolve(candidates_for(registry, "attn.merge"), context, {})


def test_a_slow_choice_is_explained(tmp_path: Path) -> None:
    file = tmp_path / "half.py"
    file.write_text(HALF)
    registry = registry_of(str(file))
    slow = merging(registry, "gpu")
    lines = fallbacks(registry, [slow, slow])
    assert lines == ["attn.merge runs as its slower torch reference, half: needs dtype f16, has f32"]
    assert fallbacks(registry, [merging(registry, "cpu")]) == [], "nobody has a kernel for it there"


KERNELS = """
from llmcore.api import KernelSpec, Requires, hookimpl
@hookimpl
def register_kernels():
    for kind in {kinds}:
        for granule in (16, 4):
            yield KernelSpec(
                op=f"attn.gqa.{{kind}}", name=f"g{{granule}}", make=f"llmcore.ops.attn_gqa_{{kind}}:make",
                priority=10 + granule, when=Requires(granules=frozenset({{granule}})),
            )
"""
SPEC = AttnSpec(heads=2, kv_heads=1, key_size=4, value_size=4, scale=1.0)
BOTH = ("decode", "prefill")


def chosen(
    tmp_path: Path, kinds: tuple[str, ...], *, sdpa: bool, pins: dict[str, str] | None = None
) -> dict[str, int]:
    file = tmp_path / "paged.py"
    file.write_text(KERNELS.format(kinds=kinds))
    build = DryBuild(
        registry=registry_of(str(file), *(() if sdpa else ("-kernels_cpu",))),
        config=read_config({"vocab_size": 9, "max_position_embeddings": 64, "eos_token_id": 1}),
        device=DeviceInfo("cpu"),
        torch_device=torch.device("meta"),
        pins=Pins(kernels=pins or {}),
    )
    return settle_granules(build, lambda config, build: build.attention(SPEC, "kv"), None)


@pytest.mark.parametrize(
    ("kinds", "sdpa", "pins", "granule"),
    [
        ((), False, {}, 1),
        (BOTH, False, {}, 4),
        (BOTH, True, {}, 1),
        (("decode",), False, {}, 1),
        (BOTH, True, {"attn.gqa.decode": "g4"}, 4),
        (BOTH, True, {"attn.gqa.decode": "g16"}, 16),
        (BOTH, True, {"attn.gqa.decode": "torch"}, 1),
    ],
)
def test_the_smallest_that_all_can_take(
    tmp_path: Path, kinds: tuple[str, ...], sdpa: bool, pins: dict[str, str], granule: int
) -> None:
    assert chosen(tmp_path, kinds, sdpa=sdpa, pins=pins) == {"kv": granule}


@pytest.mark.parametrize("granule", [3, 16])
def test_kv_comes_in_units_of_it(granule: int, make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(cache_block_seq_len=granule, max_total_token_num=100, max_req_total_len=48)
    assert llm.load().kv_total == 100 // granule * granule
    [answer] = llm.generate([[5] * 20], max_new_tokens=10, temperature=0.0)
    assert answer.token_ids == fake_answer([5] * 20, 10)


MODES = """
from llmcore.api import KernelSpec, KVLayoutSpec, ModeSpec, Requires, hookimpl

@hookimpl
def register_kernels():
    yield KernelSpec(op="attn.gqa.decode", name="gpu", make="m:m", when=Requires(device="cuda"))
    yield KernelSpec(op="attn.gqa.decode", name="half", make="m:m", when=Requires(dtypes={"f16"}))
    yield KernelSpec(op="attn.gqa.decode", name="picky", make="m:m", refuses=lambda context: "it is Monday")
    yield KernelSpec(op="attn.gqa.decode", name="stored", make="m:m", when=Requires(layouts={"token"}))

@hookimpl
def register_kv_layouts():
    yield KVLayoutSpec(name="other", make="llmcore.layers.layout:TokenLayout")

@hookimpl
def register_modes():
    yield ModeSpec(name="plain", kernels={"attn.gqa.decode": "torch"})
    yield ModeSpec(name="sampling", kernels={"sample": "torch"})
    yield ModeSpec(name="gpu", kernels={"attn.gqa.decode": "gpu"})
    yield ModeSpec(name="half", kernels={"attn.gqa.decode": "half"})
    yield ModeSpec(name="picky", kernels={"attn.gqa.decode": "picky"})
    yield ModeSpec(name="sparse", kernels={"moe.fused": "torch"})
    yield ModeSpec(name="latent", kernels={"attn.mla.decode": "torch"})
    yield ModeSpec(name="elsewhere", layouts={"token": "nowhere"})
    yield ModeSpec(name="stored", kernels={"attn.gqa.decode": "stored"})
    yield ModeSpec(name="other", layouts={"token": "other"})
"""

MISFITS = {
    "gpu": "kernel gpu for attn.gqa.decode needs device cuda, has cpu",
    "half": "needs dtype f16, has f32",
    "picky": "it is Monday",
    "sparse": "pins moe.fused, which this model does not use",
    "latent": "pins attn.mla.decode, which is an op of no active plugin",
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
    path.write_text(MODES)
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
    why = blueprint_at(model, registry, DeviceInfo("cpu")).misfit(registry.find(ModeSpec, mode))
    settings = ("--plugins", plugin, "llama", "--mode", mode, "--load_format", "dummy", "--device", "cpu")
    planned = run("plan", str(model), *settings)
    listed = ("--plugins", plugin, "--plugins", "llama", "--mode", mode, "--device", "cpu")
    explained = run("kernels", "--explain", "--model", str(model), *listed)
    with pytest.raises(ConfigError) as served:
        LLM(str(model), plugins=[plugin, "llama"], mode=[mode], load_format="dummy", device="cpu")
    for said in (planned, explained, str(served.value)):
        assert f"--mode {mode} does not fit" in said and str(why) in said
        assert said.strip().endswith("modes that fit: other, plain, sampling, stored.")


@pytest.mark.parametrize("mode", ["plain", "sampling"])
def test_a_mode_that_fits_serves(model: Path, plugin: str, mode: str) -> None:
    with LLM(str(model), plugins=[plugin, "llama"], mode=[mode], load_format="dummy", device="cpu") as llm:
        assert llm.config is not None


def test_a_mode_that_is_not_there_lists_what_fits_the_model(model: Path, plugin: str) -> None:
    with pytest.raises(ConfigError) as error:
        LLM(str(model), plugins=[plugin, "llama"], mode=["plainn"], load_format="dummy", device="cpu")
    said = str(error.value)
    assert (
        said
        == "--mode plainn: there is no such mode; modes that fit: other, plain, sampling, stored. Did you mean plain?"
    )


def test_two_modes_that_do_not_go_together_are_named(model: Path, plugin: str) -> None:
    """Each fits alone, and both fit beside others."""
    plugins = [plugin, "llama"]
    with pytest.raises(ConfigError) as error:
        LLM(str(model), plugins, mode=["sampling", "other", "stored"], load_format="dummy", device="cpu")
    why = "needs layout token, has other"
    assert str(error.value).startswith("--mode other and --mode stored do not go together for LlamaForCausalLM on cpu")
    assert why in str(error.value)
    LLM(str(model), plugins, mode=["sampling", "other"], load_format="dummy", device="cpu").close()
